"""What of an earlier run is taken over: samples that are whole, and would be made the same way again."""

import hashlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pipelines_made
import pytest
from cases_made import completed_pipeline
from safetensors.numpy import load_file, save, save_file

from gpubench.errors import SettingsError, UsageError
from gpubench.events import Sample
from gpubench.pipeline.resuming import change, files_of, finished, made_with, refuse_changes, refuse_other_files, run_at
from gpubench.runs.directory import ENVIRONMENT, FAILED, LATENT, SAMPLES, RunWriter, sample_file
from gpubench.settings.schema import CompletedPipeSettings


def settings(**given: Any) -> CompletedPipeSettings:
    known = {"work.samples": 4, "seed": 7}
    return completed_pipeline(known | {key.replace("__", "."): value for key, value in given.items()})


def run_of(
    folder: Path,
    made: list[int],
    prompts: list[str] | None = None,
    command: str = "pipe-infer",
    files: dict[str, str] | None = None,
) -> Path:
    """A run that failed after these samples."""
    writer = RunWriter(folder, "trial", "", command=command, argv=[], world_size=2, git=None)
    writer.replace(ENVIRONMENT, {"torch": {"version": "2.13.0"}, "packages": {"diffusers": "0.42.1"}})
    writer.update(workload={"weights": "abc", "scheduler": "DDIMScheduler", **({"files": files} if files else {})})
    for number in made:
        latent = np.full((4, 2, 2), number, np.float32)
        writer.replace(sample_file(number, LATENT), save({"latent": latent}))
        writer.append(
            SAMPLES,
            Sample(
                repeat=0,
                sample=number,
                seed=7 + number,
                prompt=prompts[number % len(prompts)] if prompts else None,
                started=1.0,
                finished=2.0,
                sha256=hashlib.sha256(latent.tobytes()).hexdigest(),
                latent=sample_file(number, LATENT),
            ),
        )
    writer.finish(FAILED)
    return writer.path


def test_what_is_whole_is_taken_over_and_the_rest_is_missing(tmp_path: Path) -> None:
    found = finished(run_at(run_of(tmp_path, [0, 2])), settings())
    assert sorted(found.samples) == [0, 2]
    assert found.missing(4) == [1, 3]
    assert found.made_with == {
        "weights": "abc",
        "scheduler": "DDIMScheduler",
        "torch": "2.13.0",
        "diffusers": "0.42.1",
    }


@pytest.mark.parametrize("content", [None, b"", b"short", b"\xff" * 200])
def test_a_latent_that_is_gone_or_altered_is_made_again(tmp_path: Path, content: bytes | None) -> None:
    path = run_of(tmp_path, [0, 1])
    file = path / sample_file(1, LATENT)
    file.unlink() if content is None else file.write_bytes(content)
    assert sorted(finished(run_at(path), settings()).samples) == [0]


def test_a_name_that_leads_out_of_the_directory_is_not_followed(tmp_path: Path) -> None:
    path = run_of(tmp_path, [0])
    lines = (path / SAMPLES).read_text().replace(sample_file(0, LATENT), "../../secret")
    (path / SAMPLES).write_text(lines)
    assert not finished(run_at(path), settings()).samples


def test_a_micro_batch_is_taken_over_whole_or_not_at_all(tmp_path: Path) -> None:
    found = finished(run_at(run_of(tmp_path, [0, 1, 2])), settings(work__micro_batch=2))
    assert sorted(found.samples) == [0, 1]
    assert found.missing(4) == [2, 3]


def test_samples_of_prompts_that_have_changed_since_are_refused(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a cat\nan elephant\n")
    path = run_of(tmp_path, [0, 1, 2], ["a cat", "an elephant"])
    given = settings(work__prompts=prompts)
    assert len(finished(run_at(path), given).samples) == 3
    prompts.write_text("a cat\na tiger\n")
    with pytest.raises(SettingsError, match=r"made of 'an elephant' and seed 8, and would now be made"):
        finished(run_at(path), given)


def test_a_prompt_of_a_sample_still_to_be_made_is_refused_too_when_it_has_changed(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a cat\nan elephant\na tiger\nan owl\n")
    given = settings(work__prompts=prompts)
    done = finished(run_at(run_of(tmp_path, [0], ["a cat"], files=files_of(given))), given)
    prompts.write_text("a cat\nan elephant\na tiger\nan owl\nbeyond the four samples\n")
    refuse_other_files(done, given)
    for changed in ("a cat\n", "a cat\nan elephant\na tiger\na mouse\n"):
        prompts.write_text(changed)
        with pytest.raises(SettingsError, match=r"^list of prompts changed after the finished samples were made"):
            refuse_other_files(done, given)


def test_images_that_were_not_made_are_missing_where_images_are_asked_for(tmp_path: Path) -> None:
    assert not finished(run_at(run_of(tmp_path, [0])), settings(output__images=True)).samples


def test_a_run_of_another_command_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a run of train-bench, which has no samples"):
        run_at(run_of(tmp_path, [], command="train-bench"))


def test_how_ranks_share_the_work_may_change_and_what_they_make_may_not() -> None:
    refuse_changes(settings(), settings(distributed__world_size=4, pipeline__split="balanced", inject=None))
    with pytest.raises(SettingsError, match=r"sampling\.eta=0\.5 would change them"):
        refuse_changes(settings(), settings(sampling__eta=0.5))


def test_what_is_not_on_record_is_nothing_to_compare() -> None:
    assert made_with({}, {}) == {}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pipelines_made.stable_diffusion(tmp_path_factory.mktemp("resumed") / "model")


@pytest.mark.parametrize("part", ["text_encoder", "vae"])
def test_weights_of_an_encoder_that_were_replaced_in_between_are_refused(
    model: Path, tmp_path: Path, part: str
) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    given = settings(model__name=folder)
    path = run_of(tmp_path, [0], files=files_of(given))
    refuse_other_files(finished(run_at(path), given), given)
    (weights,) = (folder / part).glob("*.safetensors")
    content = load_file(weights)
    save_file({name: tensor + 1 for name, tensor in content.items()}, weights)
    with pytest.raises(SettingsError, match=f"^{part} folder changed after .* made: [0-9a-f]{{16}} then,"):
        refuse_other_files(finished(run_at(path), given), given)


def test_what_an_older_run_did_not_record_is_no_change(model: Path, tmp_path: Path) -> None:
    given = settings(model__name=model)
    refuse_other_files(finished(run_at(run_of(tmp_path, [0])), given), given)


def test_another_number_of_threads_would_change_the_samples() -> None:
    with pytest.raises(SettingsError, match=r"performance\.cpu_threads=2 would change them"):
        refuse_changes(settings(performance__cpu_threads=1), settings(performance__cpu_threads=2))


def test_another_version_of_the_text_encoders_library_is_a_change() -> None:
    then, now = ({"packages.transformers": version} for version in ("5.1", "5.2"))
    assert change(made_with({}, then), made_with({}, now)) == (
        "transformers changed after the finished samples were made: 5.1 then, 5.2 now"
    )
