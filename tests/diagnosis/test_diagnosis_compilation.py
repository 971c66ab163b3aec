import pytest
from cases_made import PERCENT, case, gpu, ids, only, saving, training

from gpubench.diagnosis.case import ProfileCase
from gpubench.trace.profile import Compiled


def broken(part: int, ranks: int = 1) -> ProfileCase:
    compiled = Compiled(regions=4, graph_breaks=3, compilations=0, compiling=0)
    rank = gpu(idle={"python_and_launch": part}, compiled=compiled)
    return case(rank, settings=training(distributed__world_size=ranks))


def test_breaks_are_counted() -> None:
    finding = only(broken(2 * PERCENT))
    assert finding.id == "graph-breaks"
    assert finding.evidence[0] == "the step runs 4 compiled graphs, so the model breaks 3 times"
    assert ids(broken(PERCENT - 1)) == []


def test_what_is_between_regions_is_not_known_to_be_all_that_python_takes() -> None:
    finding = only(broken(20 * PERCENT))
    assert (finding.expected, finding.severity) == (None, "high")


def test_regions_of_a_trace_from_elsewhere_may_be_functions_compiled_apart() -> None:
    compiled = Compiled(regions=2, graph_breaks=1, compilations=0, compiling=0)
    finding = only(case(gpu(idle={"python_and_launch": 5 * PERCENT}, compiled=compiled)))
    assert (finding.expected, finding.severity) == (None, "low")
    assert finding.evidence[0] == "the step runs 2 compiled graphs"
    assert finding.cause.startswith("separately compiled functions, or graph breaks")


def test_ddp_breaks_graphs_on_purpose() -> None:
    assert ids(broken(2 * PERCENT, ranks=2)) == []


def test_compiling_again_while_training_is_a_finding() -> None:
    def recompiling(time: int) -> ProfileCase:
        return case(gpu(compiled=Compiled(regions=1, graph_breaks=0, compilations=2, compiling=time)))

    finding = only(recompiling(40 * PERCENT))
    assert finding.id == "recompilation"
    assert saving(finding) == pytest.approx(0.4)
    assert ids(recompiling(PERCENT - 1)) == []
