"""Diffusion inference with its steps split over ranks: the runs of `gpubench pipe-infer`."""
