"""What the command line knows of diffusion inference with its steps split over ranks, before and after the run."""
