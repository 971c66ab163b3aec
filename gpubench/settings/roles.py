"""What a difference in each setting is to the comparison of two runs.

`python tests/reference.py` makes the rows at the end from the declarations. They spare the import of the settings, which
takes longer than the rest of a comparison.
"""
# ruff: noqa: E501

from typing import Literal, NamedTuple

Role = Literal["workload", "scale", "treatment", "protocol", "uncompared"]


class Compared(NamedTuple):
    """What a comparison needs of the declaration of a setting."""

    role: Role
    """What a difference in it is to the comparison of two runs."""
    depends_on: tuple[str, ...] = ()
    """The settings from which gpubench derives the value that the user leaves open, the closest first."""
    environment: tuple[str, ...] = ()
    """The facts of environment.json that it decides."""
    superseded_by: str | None = None
    """A fact of the built model that is compared instead of it, where both runs have recorded the fact."""


# fmt: off
ROLES: dict[str, Compared] = {
    'data.image_size': Compared(role='workload', depends_on=('device',), superseded_by='sample_shape'),
    'data.path': Compared(role='workload'),
    'data.persistent_workers': Compared(role='treatment'),
    'data.pin_memory': Compared(role='treatment', depends_on=('device',)),
    'data.prefetch': Compared(role='treatment'),
    'data.samples': Compared(role='protocol'),
    'data.sequence_length': Compared(role='workload', superseded_by='sample_shape'),
    'data.source': Compared(role='workload'),
    'data.tokenizer': Compared(role='workload'),
    'data.workers': Compared(role='treatment', depends_on=('device', 'data.source', 'distributed.world_size')),
    'device': Compared(role='treatment', environment=('variables.CUDA_VISIBLE_DEVICES',)),
    'distributed.backend': Compared(role='treatment', depends_on=('device',)),
    'distributed.bucket_mb': Compared(role='treatment'),
    'distributed.gradient_as_bucket_view': Compared(role='treatment'),
    'distributed.separate_reduce_scatter': Compared(role='treatment'),
    'distributed.strategy': Compared(role='treatment'),
    'distributed.sync_gradients': Compared(role='treatment'),
    'distributed.timeout': Compared(role='protocol'),
    'distributed.world_size': Compared(role='scale', environment=('variables.GLOO_SOCKET_IFNAME', 'variables.TORCH_NCCL_ASYNC_ERROR_HANDLING')),
    'experiment': Compared(role='uncompared'),
    'inference': Compared(role='workload'),
    'inject': Compared(role='treatment'),
    'logging.graph': Compared(role='uncompared'),
    'logging.level': Compared(role='uncompared'),
    'logging.wandb': Compared(role='uncompared'),
    'logging.wandb_mode': Compared(role='uncompared'),
    'logging.wandb_project': Compared(role='uncompared'),
    'measurement.baseline': Compared(role='protocol'),
    'measurement.count_flops': Compared(role='protocol'),
    'measurement.max_repeats': Compared(role='protocol'),
    'measurement.measure_peak': Compared(role='protocol'),
    'measurement.repeats': Compared(role='protocol'),
    'measurement.stall_timeout': Compared(role='protocol'),
    'measurement.target_precision': Compared(role='protocol'),
    'measurement.telemetry_interval': Compared(role='protocol'),
    'memory.advise': Compared(role='uncompared'),
    'memory.device_memory': Compared(role='treatment'),
    'memory.device_model': Compared(role='treatment'),
    'memory.explain': Compared(role='uncompared'),
    'memory.find_batch_size': Compared(role='uncompared'),
    'memory.predict': Compared(role='treatment'),
    'memory.spare': Compared(role='uncompared'),
    'memory.steps': Compared(role='protocol'),
    'model.activation_checkpointing': Compared(role='treatment'),
    'model.arguments': Compared(role='workload'),
    'model.height': Compared(role='workload'),
    'model.name': Compared(role='workload', depends_on=('device',)),
    'model.step_ms': Compared(role='workload'),
    'model.unet': Compared(role='workload'),
    'model.width': Compared(role='workload'),
    'output.images': Compared(role='workload'),
    'output.latents': Compared(role='treatment'),
    'performance.channels_last': Compared(role='treatment', depends_on=('device', 'model.name', 'distributed.strategy')),
    'performance.compile': Compared(role='treatment'),
    'performance.compile_mode': Compared(role='treatment'),
    'performance.cpu_threads': Compared(role='treatment', depends_on=('distributed.world_size',), environment=('threads.intra_op', 'variables.OMP_NUM_THREADS', 'variables.MKL_NUM_THREADS')),
    'performance.cudnn_benchmark': Compared(role='treatment', environment=('math.cudnn_benchmark',)),
    'performance.deterministic': Compared(role='treatment', environment=('math.cudnn_deterministic', 'math.deterministic_algorithms')),
    'performance.expandable_segments': Compared(role='treatment', environment=('variables.PYTORCH_ALLOC_CONF', 'variables.PYTORCH_CUDA_ALLOC_CONF')),
    'performance.matmul_precision': Compared(role='treatment', depends_on=('precision',), environment=('math.float32_matmul_precision', 'math.matmul_allow_tf32', 'math.cudnn_allow_tf32')),
    'performance.omp_wait_policy': Compared(role='treatment', environment=('variables.OMP_WAIT_POLICY',)),
    'performance.sdpa': Compared(role='treatment', environment=('math.sdp_flash', 'math.sdp_mem_efficient', 'math.sdp_cudnn', 'math.sdp_math')),
    'pipeline.deadline': Compared(role='protocol'),
    'pipeline.in_flight': Compared(role='treatment'),
    'pipeline.split': Compared(role='treatment'),
    'precision': Compared(role='treatment', depends_on=('device',)),
    'profiling.active': Compared(role='uncompared'),
    'profiling.all_ranks': Compared(role='uncompared'),
    'profiling.compress': Compared(role='uncompared'),
    'profiling.enabled': Compared(role='uncompared'),
    'profiling.keep_compile': Compared(role='uncompared'),
    'profiling.modules': Compared(role='uncompared'),
    'profiling.profile_memory': Compared(role='uncompared'),
    'profiling.record_shapes': Compared(role='uncompared'),
    'profiling.repeat': Compared(role='uncompared'),
    'profiling.unit': Compared(role='uncompared'),
    'profiling.wait': Compared(role='uncompared'),
    'profiling.warmup': Compared(role='uncompared'),
    'profiling.with_stack': Compared(role='uncompared'),
    'program.command': Compared(role='treatment'),
    'program.directory': Compared(role='uncompared'),
    'program.grace': Compared(role='protocol'),
    'program.patience': Compared(role='protocol'),
    'program.ref': Compared(role='treatment'),
    'results': Compared(role='uncompared'),
    'sampling.eta': Compared(role='workload'),
    'sampling.guidance_rescale': Compared(role='workload'),
    'sampling.guidance_scale': Compared(role='workload'),
    'sampling.options': Compared(role='workload'),
    'sampling.scheduler': Compared(role='workload'),
    'sampling.steps': Compared(role='workload'),
    'seed': Compared(role='treatment'),
    'training.batch_size': Compared(role='scale', depends_on=('model.name', 'device')),
    'training.clip_grad_norm': Compared(role='treatment'),
    'training.epochs': Compared(role='protocol'),
    'training.grad_accumulation': Compared(role='scale'),
    'training.learning_rate': Compared(role='treatment'),
    'training.momentum': Compared(role='treatment'),
    'training.optimizer': Compared(role='workload'),
    'training.optimizer_impl': Compared(role='treatment'),
    'training.read_loss': Compared(role='treatment'),
    'training.samples_per_step': Compared(role='scale', superseded_by='samples_per_step'),
    'training.seconds': Compared(role='protocol'),
    'training.steps': Compared(role='protocol'),
    'training.warmup_steps': Compared(role='protocol'),
    'training.weight_decay': Compared(role='treatment'),
    'verify': Compared(role='protocol'),
    'work.micro_batch': Compared(role='scale'),
    'work.negative_prompt': Compared(role='workload'),
    'work.prompts': Compared(role='workload'),
    'work.samples': Compared(role='workload'),
    'work.seeds': Compared(role='workload'),
}
