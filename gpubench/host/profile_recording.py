"""What is kept of a profiled training run."""

from gpubench.host.train_recording import TrainRecorder


class ProfileRecorder(TrainRecorder):
    """One run of `gpubench profile`: train-bench's, and one more repeat that is recorded."""

    command = "profile"
