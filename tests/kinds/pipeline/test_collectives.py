import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_link import start_ranks

from gpubench.kinds.pipeline.worker import collectives
from gpubench.kinds.pipeline.worker.link import RUN_ID
from gpubench.ranks import Ranks

WORLD_SIZE = 3
ALONE = Ranks(0, 0, 1, 1)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each rank came to know."""
    folder: Path = tmp_path_factory.mktemp("collectives")
    assert start_ranks("collectives", WORLD_SIZE, folder) == [0] * WORLD_SIZE
    return [json.loads((folder / f"told-{rank}.json").read_text()) for rank in range(WORLD_SIZE)]


def test_every_rank_gets_every_ranks_bytes_whatever_their_lengths(told: list[Any]) -> None:
    for rank in told:
        assert rank["gathered"] == ["x" * 1000 * number for number in range(WORLD_SIZE)]


def test_all_ranks_have_the_run_id_that_rank_0_drew(told: list[Any]) -> None:
    (run,) = {rank["run"] for rank in told}
    assert len(bytes.fromhex(run)) == RUN_ID


def test_all_ranks_name_the_rank_the_fact_and_both_values_where_they_differ(told: list[Any]) -> None:
    start = "the ranks cannot work together: rank 2 has "
    for rank in told:
        assert rank["errors"] == {
            "weights": f"{start}weights {'9bc2' * 10}…, rank 0 has {'3fa1' * 10}…",
            "timesteps": f"{start}timesteps[1] 400.0, rank 0 has 401.0",
            "scheduler": f"{start}scheduler …AAAAbeta_start=0.0001{'B' * 19}…, "
            f"rank 0 has …AAAAbeta_start=0.00085{'B' * 18}…",
            "threads": f"{start}threads 2, rank 0 has None",
            "fewer": f"{start}1 timesteps, rank 0 has 3",
        }


def test_conditioning_reaches_every_rank_with_its_names_types_and_shapes(told: list[Any]) -> None:
    embeddings = ["torch.float32", [4, 3], 66.0]
    for rank in told:
        assert rank["conditioning"] == [
            {"prompt_embeds": embeddings, "negative_prompt_embeds": ["torch.bfloat16", [1, 2], 2.0]},
            {"prompt_embeds": embeddings},
        ]
        assert rank["nothing"] == []


def test_a_rank_alone_needs_nobody() -> None:
    collectives.agree({"weights": "3fa1"}, ALONE)
    assert collectives.gather_bytes(b"mine", ALONE) == [b"mine"]
    assert len(collectives.draw_run_id(ALONE)) == RUN_ID
    (prompt,) = collectives.broadcast_conditioning([{"prompt_embeds": torch.ones(2)}], ALONE)
    assert torch.equal(prompt["prompt_embeds"], torch.ones(2))
    assert collectives.broadcast_conditioning([], ALONE) == []
