"""One rank of `gpubench memory`: records the memory of training steps, or predicts it on tensors without memory."""
