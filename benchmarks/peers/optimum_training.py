"""optimum-benchmark's training scenario. Its claim is the throughput in its report, after its own warm-up steps.

It builds model, data and optimizer itself: from the configuration of the subject's network, and with the same shapes.
"""

from optimum_benchmark import (  # type: ignore[import-not-found]
    Benchmark,
    BenchmarkConfig,
    InlineConfig,
    PyTorchConfig,
    TrainingConfig,
)
from subject import LEARNING_RATE, Subject, build, settle, start_stopwatch

subject = Subject.from_environment()
module = build(subject).module.cpu()
folder = subject.path / "model"
module.config.image_size = subject.image_size  # where the data generator looks for it
module.config.architectures = [type(module).__name__]
module.save_pretrained(folder)

configuration = BenchmarkConfig(
    name="overhead",
    scenario=TrainingConfig(
        max_steps=subject.total,
        warmup_steps=subject.warmup,
        dataset_shapes={"dataset_size": 4 * subject.batch_size},
        training_arguments={
            "output_dir": str(subject.path / "trainer"),
            "per_device_train_batch_size": subject.batch_size,
            "learning_rate": LEARNING_RATE,
            "lr_scheduler_type": "constant",
            "max_grad_norm": 0.0,
            "optim": "adamw_torch_fused" if subject.device == "cuda" else "adamw_torch",
            "logging_strategy": "no",
            "disable_tqdm": True,
        },
    ),
    launcher=InlineConfig(),
    backend=PyTorchConfig(
        model=str(folder),
        task="image-classification",
        library="transformers",
        device=subject.device,
    ),
)
settle(subject)
start_stopwatch(subject)
subject.claim(Benchmark.launch(configuration).train.throughput.value)
