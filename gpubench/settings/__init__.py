"""The settings of every command: their schema, how they are read, and what fills them in.

>>> from gpubench.settings.loading import load
>>> from gpubench.settings.schema import TrainSettings
>>> configuration = load(TrainSettings, "tiny", {"training.batch_size": "8"})
>>> configuration.settings.training.batch_size
8
>>> configuration.origins["training.batch_size"]
'command line'
"""
