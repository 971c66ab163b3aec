"""The runs that draw the batches of a program without its training."""
