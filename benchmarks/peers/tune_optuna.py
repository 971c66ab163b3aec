"""What Optuna calls the best of planted programs: its sampler's trials, the first of which is the baseline."""

import json
import math
import random
import sys
from pathlib import Path

import optuna  # type: ignore[import-not-found]

optuna.logging.set_verbosity(optuna.logging.ERROR)
SAMPLERS = {"tpe": optuna.samplers.TPESampler, "random": optuna.samplers.RandomSampler}
programs = json.loads(Path(sys.argv[1]).read_text())
sampler, factor = SAMPLERS[sys.argv[2]], float(sys.argv[3])
found = []
for number, program in enumerate(programs):
    rates = {tuple(key): rate for key, rate in program["rates"]}
    settings, noise = len(program["rates"][0][0]), random.Random(number)

    def measure(trial: "optuna.Trial") -> float:
        combination = tuple(trial.suggest_int(str(place), 0, 1) for place in range(settings))  # noqa: B023
        return rates[combination] + noise.gauss(0, program["sigma"])  # type: ignore[no-any-return]  # noqa: B023

    study = optuna.create_study(direction="maximize", sampler=sampler(seed=number))
    study.enqueue_trial({str(place): 0 for place in range(settings)})
    study.optimize(measure, n_trials=math.ceil(factor * program["runs"]))
    best = [study.best_params[str(place)] for place in range(settings)]
    found.append({"best": best, "claimed": study.best_value - study.trials[0].value, "runs": len(study.trials)})
print(json.dumps(found))
