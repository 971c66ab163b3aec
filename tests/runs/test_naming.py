from gpubench.kinds.pipeline.headline import describe
from gpubench.runs import headlines

SETTINGS = {"precision": "fp32", "sampling.steps": 50, "work.samples": 1, "device": "cpu"}


def test_a_pipeline_is_named_by_what_was_built() -> None:
    assert describe(SETTINGS, {"model": "tiny", "scheduler": "DDIMScheduler"}) == (
        "tiny, fp32, 50 steps of DDIMScheduler, 1 sample over 1 rank on cpu"
    )


def test_what_is_not_known_is_a_question_mark() -> None:
    assert describe({}, {}, ranks=2) == "?, ?, ? steps, ? samples over 2 ranks on ?"
    assert headlines.training({}, 2) == "?, ?, batch ? x 2 ranks"
