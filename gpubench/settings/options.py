"""How the command line shows the settings that have a short option in addition to the one by their dotted name.

`python tests/reference.py` makes the rows at the end from the declarations. They avoid importing the settings, which
takes longer than everything else that `--help` and completion do.
"""
# ruff: noqa: E501

from typing import NamedTuple

MODEL, MEASUREMENT, YOUR_PROGRAM, OUTPUT = "Model and data", "Measurement", "Your program", "Output"
SAMPLING, PIPELINE = "Sampling", "Pipeline"


class Option(NamedTuple):
    """How the command line shows a setting by its alias, or by its name if it is in no section.

    A declaration leaves out what its field says already: the words of the type, and the description.
    """

    panel: str
    """The heading that it stands under in the help."""
    metavar: str = ""
    """The placeholder of its value; by default the words that the type consists of. A switch has none."""
    help: str = ""
    """A sentence; by default the description without its default."""
    several: str = ""
    """How the sentence goes on in a command that measures several values in one table."""
    found_by: str = ""
    """The function of `commands.completion` that finds what shells offer; by default the words of the metavar."""
    is_open: bool = False
    """Whether a switch that is not set is neither on nor off, and has an option for each."""


def options(command: str) -> dict[str, Option]:
    return {name: option for name, commands, option in ROWS if command in commands}


# fmt: off
ROWS: list[tuple[str, list[str], Option]] = [
    ('experiment', ['train-bench', 'pipe-infer', 'profile', 'memory', 'loader', 'tune', 'judge'], Option(panel='Output', metavar='NAME', help='Subdirectory of results that groups runs.', found_by='experiments')),
    ('results', ['train-bench', 'pipe-infer', 'profile', 'memory', 'loader', 'tune', 'judge'], Option(panel='Output', metavar='DIR', help='Directory for run directories.')),
    ('repeats', ['train-bench', 'pipe-infer', 'profile', 'memory', 'loader', 'tune', 'judge'], Option(panel='Measurement', metavar='N', help='Number of repeats of the measurement, each in fresh processes.')),
    ('target_precision', ['train-bench', 'pipe-infer', 'profile', 'memory', 'loader', 'tune', 'judge'], Option(panel='Measurement', metavar='P%', help='Repeat until the 95 % interval of the throughput is within P % of it, in place of --repeats.')),
    ('watch', ['train-bench', 'profile', 'memory', 'loader', 'tune', 'judge'], Option(panel='Your program', metavar='REGEX', help="Judge a number too that the program prints, such as 'val_loss=([0-9.]+)'.")),
    ('inference', ['train-bench', 'profile', 'memory', 'tune', 'judge'], Option(panel='Measurement', help='Measure inference instead of training: latency and throughput of forward passes.')),
    ('samples_per_step', ['train-bench', 'profile', 'tune', 'judge'], Option(panel='Your program', metavar='N', help='Samples of one rank in each step of the program, where they are counted otherwise.')),
    ('precision', ['train-bench', 'profile', 'memory', 'tune', 'judge'], Option(panel='Model and data', metavar='fp32|tf32|amp|bf16', help='Arithmetic of the forward and backward pass.')),
    ('device', ['train-bench', 'pipe-infer', 'profile', 'memory', 'tune', 'judge'], Option(panel='Measurement', metavar='cpu|cuda', help='Device to run on; by default cuda if there is a GPU.')),
    ('world_size', ['train-bench', 'pipe-infer', 'profile', 'memory', 'tune', 'judge'], Option(panel='Measurement', metavar='N', help='Number of ranks; each is one process.', several='. Several numbers are measured in one table')),
    ('measure_peak', ['train-bench', 'profile', 'memory', 'tune', 'judge'], Option(panel='Measurement', help='Also measure the attainable FLOP/s, with a large matrix product.')),
    ('model', ['train-bench', 'profile', 'memory', 'tune', 'judge'], Option(panel='Model and data', metavar='NAME', help='Built-in model, module:callable, or folder with config.json.', found_by='built_in_models')),
    ('data', ['train-bench', 'profile', 'memory', 'tune', 'judge'], Option(panel='Model and data', metavar='SOURCE', help='Source: synthetic, synthetic-host, image-folder, text or module:callable.')),
    ('batch_size', ['train-bench', 'profile', 'memory', 'tune', 'judge'], Option(panel='Model and data', metavar='N', help='Samples per rank and forward pass.', several='; several sizes are measured in one table')),
    ('steps', ['train-bench', 'profile', 'tune', 'judge'], Option(panel='Measurement', metavar='N', help='Steps measured in each repeat.')),
    ('baseline', ['pipe-infer'], Option(panel='Measurement', metavar='off|sequential|replicas', help='What to measure in addition, for comparison.')),
    ('precision', ['pipe-infer'], Option(panel='Model and data', metavar='fp32|fp16|bf16', help='Type of weights and latents.')),
    ('verify', ['pipe-infer'], Option(panel='Pipeline', help='Compare each sample bit by bit with single-process diffusers; default for small models.', is_open=True)),
    ('inject', ['pipe-infer'], Option(panel='Pipeline', metavar='FAULT', help='Inject a fault, for tests: KIND,rank=R,sample=S[,seconds=T].')),
    ('model', ['pipe-infer'], Option(panel='Model and data', metavar='DIR', help='Folder of a local diffusers pipeline.')),
    ('unet', ['pipe-infer'], Option(panel='Model and data', metavar='dummy|tiny|unet2d|sd15|sdxl', help='Architecture with random weights, instead of --model.')),
    ('step_ms', ['pipe-infer'], Option(panel='Model and data', metavar='MS', help='Duration of one evaluation of the dummy, in milliseconds.')),
    ('scheduler', ['pipe-infer'], Option(panel='Sampling', metavar='CLASS', help="Class name of a diffusers scheduler; the model's own by default.")),
    ('steps', ['pipe-infer'], Option(panel='Sampling', metavar='N', help='Denoising steps of each sample.')),
    ('guidance_scale', ['pipe-infer'], Option(panel='Sampling', metavar='X', help='Scale of classifier-free guidance; 1 or less turns it off.')),
    ('samples', ['pipe-infer'], Option(panel='Sampling', metavar='N', help='Images to generate.')),
    ('seeds', ['pipe-infer'], Option(panel='Sampling', metavar='S,S,...', help='Seeds with each of which every prompt is made: 1,2,3 or 0-7.')),
    ('micro_batch', ['pipe-infer'], Option(panel='Sampling', metavar='N', help='Images that are evaluated and handed over together.')),
    ('prompts', ['pipe-infer'], Option(panel='Model and data', metavar='FILE', help='Text file with one prompt per line.')),
    ('split', ['pipe-infer'], Option(panel='Pipeline', metavar='even|balanced|A,B,...', help='Evaluations per rank; with even, the last rank takes the remainder.')),
    ('in_flight', ['pipe-infer'], Option(panel='Pipeline', metavar='N', help='Maximum number of hand-offs in flight on each side of a rank.')),
    ('device_memory', ['memory'], Option(panel='Measurement', metavar='SIZE', help='Memory to fit into, such as 80GiB.')),
    ('steps', ['memory'], Option(panel='Measurement', metavar='N', help='Optimizer steps to record, without timing them; 3 by default, 5 for a program.')),
    ('predict', ['memory'], Option(panel='Measurement', help='Predict the memory on a GPU; needs no GPU.')),
    ('device_model', ['memory'], Option(panel='Measurement', metavar='NAME', help='GPU to predict for, such as h200 or a100-80gb.', found_by='devices')),
    ('spare', ['memory'], Option(panel='Measurement', metavar='P%', help='Share of memory that this batch must leave free; 5% by default.')),
    ('find_batch_size', ['memory'], Option(panel='Measurement', help='Find the largest batch size that fits.')),
    ('steps', ['loader'], Option(panel='Measurement', metavar='N', help='Batches drawn in each repeat.')),
]
