"""The probe: measures a program that trains or infers, from inside and without changing the program.

The host puts this folder at the front of PYTHONPATH. Every Python process of the program then imports
`sitecustomize.py`, which loads this package under the name `_gpubench_probe` once the process has imported torch. So
the package imports the standard library and torch only, and runs on Python 3.9 and torch 2.1 or later, because the
program may live in another environment than gpubench.

The probe computes nothing that the program computes, and never waits for a device before the last measured step. It
sends the events of `gpubench.events` to the host. It writes files only in a repeat that is recorded, into the
host's own folder.
"""

ADDRESS_VARIABLE = "_GPUBENCH_PROBE"
"""The environment variable with the address of the host's socket."""
TREATMENTS_VARIABLE = "_GPUBENCH_TREATMENTS"
"""The environment variable with the treatments as JSON; see `treatments.py`."""
INFERENCE_VARIABLE = "_GPUBENCH_INFERENCE"
"""The environment variable that is set if the program's inference is measured, and not its training."""
LOADER_VARIABLE = "_GPUBENCH_LOADER"
"""The environment variable that is set if the batches of the program are to be drawn without its training."""
FOLLOW_VARIABLE = "_GPUBENCH_FOLLOW"
"""The environment variable that is set if the memory of the program is to be followed instead of its time."""
SAMPLED_VARIABLE = "_GPUBENCH_SAMPLED"
"""The environment variable that is set if the repeat is recorded, so that the program's code is sampled."""
HOSTS_VARIABLE = "_GPUBENCH_HOSTS"
"""The environment variable with the number of hosts that a batch system has started together."""
