"""One rank of a benchmark of training or inference."""
