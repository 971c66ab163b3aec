"""What of an earlier run is taken over: samples that are whole, and would be made the same way again."""

import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pipelines_made
import pytest
from cases_made import completed_pipeline
from safetensors.numpy import load_file, save, save_file

from gpubench.errors import RunDirectoryError, RunFailed, SettingsError, UsageError
from gpubench.events import Sample
from gpubench.kinds.pipeline.resuming import (
    change,
    files_of,
    finished,
    made_with,
    refuse_changes,
    refuse_other_files,
    run_at,
)
from gpubench.kinds.pipeline.settings import CompletedPipeSettings
from gpubench.runs.directory import (
    CONFIG,
    ENVIRONMENT,
    FAILED,
    IMAGE,
    LATENT,
    RUN,
    SAMPLES,
    RunWriter,
    sample_file,
)


def settings(**given: Any) -> CompletedPipeSettings:
    known: dict[str, Any] = {"work.samples": 4, "seed": 7}
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


IMAGES = {"output.images": True, "model.name": "model", "model.unet": None}
PIXEL = b"\x89PNG\r\n\x1a\n"


def illustrated(folder: Path, *, digests: bool = True) -> Path:
    """A run that failed after three samples with an image each."""
    writer = RunWriter(folder, "trial", "seed: 7\n", command="pipe-infer", argv=[], world_size=2, git=None)
    writer.replace(ENVIRONMENT, {"torch": {"version": "2.13.0"}, "packages": {"diffusers": "0.42.1"}})
    writer.update(workload={"weights": "abc", "scheduler": "DDIMScheduler"})
    for number in range(3):
        latent = np.full((4, 2, 2), number, np.float32)
        files = {
            sample_file(number, LATENT): save({"latent": latent}),
            sample_file(number, IMAGE): PIXEL + bytes([number]) * 64,
        }
        for name, content in files.items():
            writer.replace(name, content)
        sample = Sample(
            repeat=0,
            sample=number,
            seed=7 + number,
            prompt=None,
            started=1.0,
            finished=2.0,
            sha256=hashlib.sha256(latent.tobytes()).hexdigest(),
            latent=sample_file(number, LATENT),
            image=sample_file(number, IMAGE),
            digests={name: hashlib.sha256(content).hexdigest() for name, content in files.items()} if digests else {},
        )
        writer.append(SAMPLES, sample)
    writer.finish(FAILED)
    return writer.path


def test_samples_of_listed_seeds_are_taken_over_by_prompt_and_seed(tmp_path: Path) -> None:
    path = run_of(tmp_path, [0, 1])  # of the seeds 7 and 8
    assert sorted(finished(run_at(path), settings(work__seeds="7-9", work__samples=3)).samples) == [0, 1]
    with pytest.raises(SettingsError, match="of no prompt and seed 8, and would now be made of no prompt and seed 6"):
        finished(run_at(path), settings(work__seeds="7,6", work__samples=2))


@pytest.mark.parametrize("suffix", [LATENT, IMAGE])
def test_files_that_name_prompt_and_seed_are_taken_over_and_checked_as_well(tmp_path: Path, suffix: str) -> None:
    path = illustrated(tmp_path)
    listed = (path / SAMPLES).read_text()
    for number in range(3):
        for kind in (LATENT, IMAGE):
            name = sample_file(number, kind, f"-prompt1-seed{7 + number}")
            (path / sample_file(number, kind)).rename(path / name)
            listed = listed.replace(sample_file(number, kind), name)
    (path / SAMPLES).write_text(listed)
    given = settings(**IMAGES, **{"work.seeds": "7-9", "work.samples": 3})
    found = finished(run_at(path), given)
    assert sorted(found.samples) == [0, 1, 2]
    damaged = sample_file(1, suffix, "-prompt1-seed8")
    halved(path / damaged)
    found = finished(run_at(path), given)
    assert sorted(found.samples) == [0, 2]
    assert found.damaged == [f"1 ({damaged} has changed since it was written)"]


@pytest.mark.parametrize("content", [None, b"", b"seed: 8\n"])
def test_a_configuration_that_is_not_that_of_the_run_is_an_error(tmp_path: Path, content: bytes | None) -> None:
    config = illustrated(tmp_path) / CONFIG
    config.unlink() if content is None else config.write_bytes(content)
    with pytest.raises(RunDirectoryError, match=r"config\.yaml (cannot be read|has changed)"):
        run_at(config.parent)


def halved(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flipped_at(place: int) -> Callable[[Path], None]:
    def flip(file: Path) -> None:
        content = bytearray(file.read_bytes())
        content[place] ^= 1
        file.write_bytes(content)

    return flip


def linked(file: Path) -> None:
    file.unlink()
    file.symlink_to("/etc/passwd")


def a_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def swapped(file: Path) -> None:
    other = file.with_name(file.name.replace("00001", "00000"))
    shutil.copy(other, file)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "halved": (halved, "has changed since it was written"),
    "flipped at the start": (flipped_at(12), "has changed since it was written"),
    "flipped at the end": (flipped_at(-1), "has changed since it was written"),
    "one byte longer": (lambda file: file.write_bytes(file.read_bytes() + b" "), "has changed since it was written"),
    "empty": (lambda file: file.write_bytes(b""), "has changed since it was written"),
    "swapped": (swapped, "has changed since it was written"),
    "missing": (Path.unlink, "is missing"),
    "a link": (linked, "has changed since it was written"),
    "a pipe": (a_pipe, "cannot be read: it is not a regular file"),
    "a folder": (a_folder, "cannot be read: "),
}


@pytest.mark.parametrize("suffix", [LATENT, IMAGE])
@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_of_a_sample_is_not_taken_over_and_the_reason_is_given(
    tmp_path: Path, kind: str, suffix: str
) -> None:
    path = illustrated(tmp_path)
    assert sorted(finished(run_at(path), settings(**IMAGES)).samples) == [0, 1, 2]
    damage, reason = DAMAGE[kind]
    name = sample_file(1, suffix)
    damage(path / name)
    found = finished(run_at(path), settings(**IMAGES))
    assert sorted(found.samples) == [0, 2]
    assert found.missing(3) == [1]
    [said] = found.damaged
    assert said.startswith(f"1 ({name} {reason}")
    assert set(found.files(0)) == {sample_file(0, LATENT), sample_file(0, IMAGE)}


@pytest.mark.parametrize("place", range(0, 400, 7))
def test_samples_of_a_damaged_list_are_made_again_or_refused(tmp_path: Path, place: int) -> None:
    path = illustrated(tmp_path)
    before = {sample.sample: sample for sample in run_at(path).samples}
    flipped_at(place)(path / SAMPLES)
    try:
        found = finished(run_at(path), settings(**IMAGES))
    except SettingsError:  # the seed or the prompt on record is another one
        return
    for number, sample in found.samples.items():
        assert (sample.seed, sample.sha256) == (before[number].seed, before[number].sha256)
        assert found.files(number) == {name: (path / name).read_bytes() for name in before[number].digests}


def test_a_line_that_cannot_be_read_is_among_the_reasons(tmp_path: Path) -> None:
    path = illustrated(tmp_path)
    lines = (path / SAMPLES).read_text().splitlines()
    (path / SAMPLES).write_text("\n".join([lines[0], lines[1][:50], lines[2]]) + "\n")
    found = finished(run_at(path), settings(**IMAGES))
    assert sorted(found.samples) == [0, 2]
    assert found.damaged[0].startswith("samples.jsonl:2: ")


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        (CONFIG, flipped_at(-2), "has changed since the run"),
        (ENVIRONMENT, Path.unlink, "does not give the version of torch of its samples"),
        (ENVIRONMENT, halved, "does not give the version of torch of its samples"),
        (ENVIRONMENT, a_pipe, "does not give the version of torch of its samples"),
        (RUN, halved, "is damaged"),
        (RUN, a_pipe, "cannot be read"),
        (RUN, Path.unlink, "is not a run directory"),
    ],
)
def test_a_run_whose_record_is_damaged_is_refused(
    tmp_path: Path, file: str, damage: Callable[[Path], None], message: str
) -> None:
    path = illustrated(tmp_path)
    damage(path / file)
    with pytest.raises(RunDirectoryError, match=message):
        finished(run_at(path), settings(**IMAGES))


def test_images_of_an_older_version_have_no_digests_and_are_made_again(tmp_path: Path) -> None:
    path = illustrated(tmp_path, digests=False)
    found = finished(run_at(path), settings(**IMAGES))
    assert not found.samples
    assert found.damaged[0] == "0 (samples.jsonl has no digest of samples/00000.png)"
    assert sorted(finished(run_at(path), settings()).samples) == [0, 1, 2]  # latents have their own digest


def test_a_file_that_is_damaged_after_the_check_is_not_copied(tmp_path: Path) -> None:
    path = illustrated(tmp_path)
    found = finished(run_at(path), settings(**IMAGES))
    halved(path / sample_file(1, IMAGE))
    with pytest.raises(RunFailed, match=r"sample 1 of .* cannot be taken over: samples/00001\.png has changed"):
        found.files(1)


def test_images_alone_are_taken_over_where_no_latents_are_kept(tmp_path: Path) -> None:
    path = illustrated(tmp_path)
    (path / sample_file(1, LATENT)).unlink()
    found = finished(run_at(path), settings(output__latents=False, **IMAGES))
    assert sorted(found.samples) == [0, 1, 2]
    assert list(found.files(0)) == [sample_file(0, IMAGE)]


@pytest.mark.parametrize(
    ("size", "before", "now", "kept"),
    [
        (1, 4, 9, [0, 1, 2]),
        (1, 4, 2, [0, 1]),
        (2, 3, 4, [0, 1]),
        (2, 4, 3, [0, 1]),
        (3, 3, 6, [0, 1, 2]),
        (4, 3, 8, []),
    ],
)
def test_another_number_of_samples_leaves_those_whose_micro_batch_stays_the_same(
    tmp_path: Path, size: int, before: int, now: int, kept: list[int]
) -> None:
    one, other = (settings(work__samples=samples, work__micro_batch=size) for samples in (before, now))
    refuse_changes(one, other)
    found = finished(run_at(illustrated(tmp_path)), other, before)
    assert sorted(found.samples) == kept


@pytest.mark.parametrize(
    ("before", "after", "message", "hint"),
    [
        ("", "fog", "work.negative_prompt=fog would change them", "leave it out (it was not set), or start a new run"),
        ("fog", "", "work.negative_prompt without a value would", "leave it out (it was fog), or start a new run"),
    ],
)
def test_a_setting_without_a_value_is_named_as_such(before: str, after: str, message: str, hint: str) -> None:
    with pytest.raises(SettingsError) as refused:
        refuse_changes(settings(work__negative_prompt=before), settings(work__negative_prompt=after))
    assert message in refused.value.message
    assert str(refused.value.hint).startswith(hint)


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
