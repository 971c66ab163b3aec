"""`gpubench loader`: what the data of a program costs."""

import json
import os
import sys
from pathlib import Path
from textwrap import dedent
from typing import Any

import forked
import pytest
import torch
from running import Finished, gpubench, metrics
from torch.utils.data import DataLoader, Dataset, TensorDataset

from gpubench.data_cost import DataCost
from gpubench.errors import DataError
from gpubench.feeding import numbers
from gpubench.kinds.loader.headline import model
from gpubench.kinds.loader.worker.own_data import loader_of

PROGRAM = """
import time, torch
from torch.utils.data import DataLoader, Dataset

class Blur:
    def __call__(self, image):
        time.sleep(0.004)
        return image

class Photos(Dataset):
    def __init__(self):
        self.transform = Blur()
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return self.transform(torch.ones(3)), 0.0

torch.set_num_threads(1)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(3):
    for images, _ in DataLoader(Photos(), batch_size=4):
        optimizer.zero_grad()
        model(images).sum().backward()
        optimizer.step()
"""


@pytest.fixture(autouse=True)
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(forked.PROGRAMS, "1")


def loader(folder: Path, *options: str, program: str = PROGRAM) -> Finished:
    (folder / "train.py").write_text(dedent(program))
    command = ("-q", "--steps", "4", *options, "--", sys.executable, "train.py")
    return gpubench("loader", *command, results=folder / "results", cwd=folder)


def cost(run: Path) -> DataCost:
    import msgspec

    return msgspec.json.decode((run / "loader.json").read_bytes(), type=DataCost)


def test_the_stages_of_a_program_are_measured_and_the_slow_one_is_named(tmp_path: Path) -> None:
    done = loader(tmp_path, "--alone", "--repeats", "2")
    assert done.code == 0, done.stderr
    found = cost(done.run)
    assert found.stages[0].called == "transform Blur"
    assert found.stages[0].place == "train.py:5"
    assert found.stages[0].waits > 0.5
    assert sum(stage.share for stage in found.stages) == pytest.approx(1)
    measured = metrics(done)
    assert measured["stage_transform_Blur"]["estimate"] >= 0.004
    assert measured["throughput"]["estimate"] <= 1 / 0.004
    assert len(measured["throughput"]["repeats"]) == 2
    findings = [one["id"] for one in done.document("findings.json")["findings"]]
    assert "slow-transform" in findings
    assert "transform Blur" in done.stdout
    assert "Where the time of a sample goes" in (done.run / "report.html").read_text()


def test_other_numbers_of_workers_and_ready_data_are_measured_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpubench.feeding.MOST_WAITING", 1)
    done = loader(tmp_path, "--repeats", "1", "--json")
    assert done.code == 0, done.stderr
    (run,) = [each for each in done.runs if (each / "loader.json").is_file() and cost(each).ceiling]
    found = cost(run)
    assert [one.workers for one in found.scaling][:2] == [0, 1]
    assert all(one.throughput for one in found.scaling)
    assert found.ceiling
    assert found.ceiling.ready.value > 2 * found.ceiling.training.value
    documents = json.loads(done.stdout)["runs"]
    assert documents[0]["loader"]["ceiling"]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ((), "loader needs a program that trains, or its data"),
        (("--batch-size", "4"), "--batch-size needs --data"),
        (("--data", "train"), "--data 'train' is not module:callable"),
        (("--data", "train:Photos", "--batch-size", "0"), "--batch-size takes a whole number of 1 or more, not '0'"),
        (("--data", "train:Photos", "--", "python", "train.py"), "--data takes the place of a program"),
    ],
    ids=["nothing", "size alone", "no callable", "size 0", "both"],
)
def test_what_cannot_be_drawn_from_is_refused_before_anything_runs(
    tmp_path: Path, options: tuple[str, ...], error: str
) -> None:
    done = gpubench("loader", *options, results=tmp_path / "results", cwd=tmp_path)
    assert done.code == 2
    assert error in done.stderr
    assert "hint: " in done.stderr
    assert not (tmp_path / "results").exists()


def test_a_dataset_without_a_program_is_drawn_from(tmp_path: Path) -> None:
    (tmp_path / "my_data.py").write_text(
        "import torch\n"
        "from torch.utils.data import TensorDataset\n"
        "def dataset():\n"
        "    return TensorDataset(torch.ones(64, 3))\n"
        "def batches():\n"
        "    return (torch.ones(8, 3) for _ in range(20))\n"
    )
    for name, size in (("dataset", 16), ("batches", 8)):
        options = ("--alone", "-q", "--repeats", "1", "--steps", "4", "--data", f"my_data:{name}")
        more = ("--batch-size", "16") if name == "dataset" else ()
        done = gpubench("loader", *options, *more, results=tmp_path / name, cwd=tmp_path)
        assert done.code == 0, done.stderr
        assert done.document("run.json")["workload"]["samples_per_step"] == size
        assert f"data of my_data:{name}, {size} samples a batch" in done.stdout


@pytest.mark.parametrize(
    ("returned", "size", "error"),
    [
        ("TensorDataset(torch.ones(0, 3))", None, "the dataset of --data m:made is empty"),
        ("Endless()", None, "the dataset of --data m:made has no __len__"),
        ("None", None, "--data m:made returned None"),
        ("5", None, "--data m:made returned int"),
        ("DataLoader([1])", 4, "--data m:made returns a DataLoader, which has its own batch size"),
        ("(torch.ones(2, 3) for _ in range(3))", 4, "--data m:made returns batches, which have their own size"),
    ],
)
def test_data_that_no_loader_can_be_made_of_is_refused(returned: str, size: int | None, error: str) -> None:
    class Endless(Dataset[Any]):
        def __getitem__(self, index: int) -> int:
            return index

    known = {"torch": torch, "TensorDataset": TensorDataset, "DataLoader": DataLoader, "Endless": Endless}
    with pytest.raises(DataError) as refused:
        loader_of("m:made", eval(returned, known), size)
    assert refused.value.message == error
    assert refused.value.hint


def test_a_list_is_of_batches_or_with_a_batch_size_of_samples() -> None:
    samples = [torch.ones(3)] * 8
    assert len(next(iter(loader_of("m:made", samples, 4)))) == 4
    assert next(iter(loader_of("m:made", samples, None))).shape == (3,)


def test_of_two_loaders_the_one_is_measured_that_training_waits_for(tmp_path: Path) -> None:
    program = """
        import time, torch
        from torch.utils.data import DataLoader, Dataset

        class Data(Dataset):
            def __init__(self, seconds):
                self.seconds = seconds

            def __len__(self):
                return 60

            def __getitem__(self, index):
                time.sleep(self.seconds)
                return torch.ones(4)

        class Slow(Data):
            pass

        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(9):
            for one, other in zip(DataLoader(Slow(0.003), batch_size=4), DataLoader(Data(0), batch_size=4)):
                optimizer.zero_grad()
                model(one + other).sum().backward()
                optimizer.step()
    """
    done = loader(tmp_path, "--alone", "--repeats", "1", program=program)
    found = cost(done.run)
    assert (found.record.dataset, found.record.others) == ("Slow", 1)


@pytest.mark.stress
@pytest.mark.parametrize("more", ["", ", persistent_workers=True"])
def test_workers_of_a_fork_server_are_seen(tmp_path: Path, more: str) -> None:
    setup, training = PROGRAM.split("torch.set_num_threads(1)\n")
    workers = f"batch_size=4, num_workers=2, multiprocessing_context='forkserver'{more}"
    body = training.replace("batch_size=4", workers).replace("\n", "\n    ")
    done = loader(tmp_path, "--alone", "--repeats", "1", program=f"{setup}if __name__ == '__main__':\n    {body}")
    assert done.code == 0, done.stderr
    found = cost(done.run)
    assert found.stages[0].called == "transform Blur"
    assert (found.record.cpu or 0) > 0


@pytest.mark.parametrize(
    ("own", "cores", "waits", "tried"),
    [
        (0, 2, False, [0, 1, 2]),
        (0, 2, True, [0, 1, 2, 4, 8]),
        (4, 8, False, [0, 1, 2, 4, 8]),
        (3, 16, False, [0, 1, 3, 4, 8, 16]),
        (0, 1, False, [0, 1]),
    ],
)
def test_the_numbers_of_workers_to_try(own: int, cores: int, waits: bool, tried: list[int]) -> None:
    assert numbers(own, cores, waits=waits) == tried


def test_what_is_drawn_is_called_by_its_program_or_its_data() -> None:
    own = f"{sys.executable} -m gpubench.kinds.loader.worker.own_data my_data:make -"
    assert model({"program.command": own}, {}) == "my_data:make"
    assert model({"program.command": "python train.py"}, {}) == "python train.py"
    assert os.sep in own
