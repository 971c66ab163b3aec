"""What a trace of any PyTorch program shows: read without torch, in exact nanoseconds."""
