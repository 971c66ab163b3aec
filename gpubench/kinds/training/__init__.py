"""Training and inference of a model of gpubench: the runs of `gpubench train-bench`, recorded by `gpubench profile`."""
