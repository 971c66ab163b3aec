"""Diffusion inference with the denoising steps split over ranks: the worker side."""
