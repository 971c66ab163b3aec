"""The worker side of diffusion inference with the denoising steps split over ranks."""
