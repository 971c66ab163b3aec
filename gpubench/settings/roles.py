"""What a difference in each setting is to the comparison of two runs.

`python tests/reference.py` makes the rows at the end from the declarations. They spare the import of the settings, which
takes longer than the rest of a comparison.
"""
# ruff: noqa: E501

from typing import Literal, NamedTuple

Role = Literal["workload", "scale", "treatment", "protocol", "uncompared"]


class Declared(NamedTuple):
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
ROLES: dict[str, Declared] = {
    'data.cached': Declared(role='treatment'),
    'data.image_size': Declared(role='workload', depends_on=('device',), superseded_by='sample_shape'),
    'data.path': Declared(role='workload'),
    'data.persistent_workers': Declared(role='treatment'),
    'data.pin_memory': Declared(role='treatment', depends_on=('device',)),
    'data.prefetch': Declared(role='treatment'),
    'data.samples': Declared(role='protocol'),
    'data.sequence_length': Declared(role='workload', superseded_by='sample_shape'),
    'data.source': Declared(role='workload'),
    'data.tokenizer': Declared(role='workload'),
    'data.workers': Declared(role='treatment', depends_on=('device', 'data.source', 'distributed.world_size')),
    'device': Declared(role='treatment', environment=('variables.CUDA_VISIBLE_DEVICES',)),
    'distributed.backend': Declared(role='treatment', depends_on=('device',)),
    'distributed.bucket_mb': Declared(role='treatment'),
    'distributed.gradient_as_bucket_view': Declared(role='treatment'),
    'distributed.separate_reduce_scatter': Declared(role='treatment'),
    'distributed.strategy': Declared(role='treatment'),
    'distributed.sync_gradients': Declared(role='treatment'),
    'distributed.timeout': Declared(role='protocol'),
    'distributed.world_size': Declared(role='scale', environment=('variables.GLOO_SOCKET_IFNAME', 'variables.TORCH_NCCL_ASYNC_ERROR_HANDLING')),
    'experiment': Declared(role='uncompared'),
    'inference': Declared(role='workload'),
    'inject': Declared(role='treatment'),
    'logging.graph': Declared(role='uncompared'),
    'logging.level': Declared(role='uncompared'),
    'logging.wandb': Declared(role='uncompared'),
    'logging.wandb_mode': Declared(role='uncompared'),
    'logging.wandb_project': Declared(role='uncompared'),
    'measurement.baseline': Declared(role='protocol'),
    'measurement.count_flops': Declared(role='protocol'),
    'measurement.max_repeats': Declared(role='protocol'),
    'measurement.measure_peak': Declared(role='protocol'),
    'measurement.repeats': Declared(role='protocol'),
    'measurement.stall_timeout': Declared(role='protocol'),
    'measurement.target_precision': Declared(role='protocol'),
    'measurement.telemetry_interval': Declared(role='protocol'),
    'memory.advise': Declared(role='uncompared'),
    'memory.device_memory': Declared(role='treatment'),
    'memory.device_model': Declared(role='treatment'),
    'memory.explain': Declared(role='uncompared'),
    'memory.find_batch_size': Declared(role='uncompared'),
    'memory.predict': Declared(role='treatment'),
    'memory.spare': Declared(role='uncompared'),
    'memory.steps': Declared(role='protocol'),
    'model.activation_checkpointing': Declared(role='treatment'),
    'model.arguments': Declared(role='workload'),
    'model.height': Declared(role='workload'),
    'model.name': Declared(role='workload', depends_on=('device',)),
    'model.step_ms': Declared(role='workload'),
    'model.unet': Declared(role='workload'),
    'model.width': Declared(role='workload'),
    'output.images': Declared(role='workload'),
    'output.latents': Declared(role='treatment'),
    'performance.channels_last': Declared(role='treatment', depends_on=('device', 'model.name', 'distributed.strategy')),
    'performance.compile': Declared(role='treatment'),
    'performance.compile_mode': Declared(role='treatment'),
    'performance.cpu_threads': Declared(role='treatment', depends_on=('distributed.world_size',), environment=('threads.intra_op', 'variables.OMP_NUM_THREADS', 'variables.MKL_NUM_THREADS')),
    'performance.cudnn_benchmark': Declared(role='treatment', environment=('math.cudnn_benchmark',)),
    'performance.deterministic': Declared(role='treatment', environment=('math.cudnn_deterministic', 'math.deterministic_algorithms')),
    'performance.expandable_segments': Declared(role='treatment', environment=('variables.PYTORCH_ALLOC_CONF', 'variables.PYTORCH_CUDA_ALLOC_CONF')),
    'performance.matmul_precision': Declared(role='treatment', depends_on=('precision',), environment=('math.float32_matmul_precision', 'math.matmul_allow_tf32', 'math.cudnn_allow_tf32')),
    'performance.omp_wait_policy': Declared(role='treatment', environment=('variables.OMP_WAIT_POLICY',)),
    'performance.sdpa': Declared(role='treatment', environment=('math.sdp_flash', 'math.sdp_mem_efficient', 'math.sdp_cudnn', 'math.sdp_math')),
    'pipeline.deadline': Declared(role='protocol'),
    'pipeline.in_flight': Declared(role='treatment'),
    'pipeline.split': Declared(role='treatment'),
    'precision': Declared(role='treatment', depends_on=('device',)),
    'profiling.active': Declared(role='uncompared'),
    'profiling.all_ranks': Declared(role='uncompared'),
    'profiling.compress': Declared(role='uncompared'),
    'profiling.enabled': Declared(role='uncompared'),
    'profiling.keep_compile': Declared(role='uncompared'),
    'profiling.modules': Declared(role='uncompared'),
    'profiling.profile_memory': Declared(role='uncompared'),
    'profiling.record_shapes': Declared(role='uncompared'),
    'profiling.repeat': Declared(role='uncompared'),
    'profiling.unit': Declared(role='uncompared'),
    'profiling.wait': Declared(role='uncompared'),
    'profiling.warmup': Declared(role='uncompared'),
    'profiling.with_stack': Declared(role='uncompared'),
    'program.command': Declared(role='treatment'),
    'program.directory': Declared(role='uncompared'),
    'program.grace': Declared(role='protocol'),
    'program.patch': Declared(role='treatment'),
    'program.patience': Declared(role='protocol'),
    'program.ref': Declared(role='treatment'),
    'program.watch': Declared(role='uncompared'),
    'results': Declared(role='uncompared'),
    'sampling.eta': Declared(role='workload'),
    'sampling.guidance_rescale': Declared(role='workload'),
    'sampling.guidance_scale': Declared(role='workload'),
    'sampling.options': Declared(role='workload'),
    'sampling.scheduler': Declared(role='workload'),
    'sampling.steps': Declared(role='workload'),
    'seed': Declared(role='treatment'),
    'training.batch_size': Declared(role='scale', depends_on=('model.name', 'device')),
    'training.clip_grad_norm': Declared(role='treatment'),
    'training.epochs': Declared(role='protocol'),
    'training.grad_accumulation': Declared(role='scale'),
    'training.learning_rate': Declared(role='treatment'),
    'training.momentum': Declared(role='treatment'),
    'training.optimizer': Declared(role='workload'),
    'training.optimizer_impl': Declared(role='treatment'),
    'training.read_loss': Declared(role='treatment'),
    'training.samples_per_step': Declared(role='scale', superseded_by='samples_per_step'),
    'training.seconds': Declared(role='protocol'),
    'training.steps': Declared(role='protocol'),
    'training.warmup_steps': Declared(role='protocol'),
    'training.weight_decay': Declared(role='treatment'),
    'verify': Declared(role='protocol'),
    'work.micro_batch': Declared(role='scale'),
    'work.negative_prompt': Declared(role='workload'),
    'work.prompts': Declared(role='workload'),
    'work.samples': Declared(role='workload'),
    'work.seeds': Declared(role='workload'),
}
