"""A package for each kind of run; `gpubench.registry` has a row for each.

>>> from gpubench.registry import kind_of
>>> kind_of("pipe-infer").recorded_by
'gpubench.kinds.pipeline.recorder:PipeRecorder'
"""
