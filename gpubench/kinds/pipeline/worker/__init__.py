"""One rank of diffusion inference with the denoising steps split over ranks."""
