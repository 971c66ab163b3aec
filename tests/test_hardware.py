from dataclasses import FrozenInstanceError

import pytest

from gpubench.errors import DeviceError
from gpubench.hardware import ACCELERATORS, Accelerator, find_accelerator, find_by_key, peak_flops

MIB = 2**20


def bf16(name: str) -> float:
    peak = peak_flops(name, "bf16")
    assert peak is not None
    return peak.flops_per_s


def test_names_that_begin_alike_are_different_devices() -> None:
    assert bf16("NVIDIA L40S") == pytest.approx(362.05e12)
    assert bf16("NVIDIA L40") == pytest.approx(181.05e12)
    assert bf16("NVIDIA L4") == pytest.approx(121e12)


def test_the_form_factors_of_one_gpu_have_their_own_peaks() -> None:
    assert bf16("NVIDIA H100 80GB HBM3") == pytest.approx(989.4e12)
    assert bf16("NVIDIA H100 PCIe") == pytest.approx(756e12)
    assert bf16("NVIDIA H100 NVL") == pytest.approx(835.5e12)
    assert bf16("NVIDIA H200 NVL") < bf16("NVIDIA H200")


def test_an_h200_is_known_by_the_name_it_reports() -> None:
    found = find_accelerator("NVIDIA H200")
    assert found is not None
    assert found.key == "h200"
    assert found.memory_bytes == 141 * 2**30
    assert found.memory_bandwidth == pytest.approx(4.8e12)


def test_case_and_spacing_of_a_name_do_not_matter() -> None:
    assert find_accelerator("  nvidia   h200\n") is find_by_key("H200")


@pytest.mark.parametrize(
    "name",
    [
        "",
        "H200",
        "NVIDIA",
        "NVIDIA H100",
        "NVIDIA H200 Ti",
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 3060 Laptop GPU",
        "NVIDIA GeForce RTX 5070 Ti Laptop GPU",
        "NVIDIA GeForce RTX 4070 Ti SUPER 16GB",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition MIG 1g.24gb",
        "NVIDIA H100 80GB HBM3 (simulated)",
        "NVIDIA GeForce RTX 5090 D",
        "NVIDIA GB10",
        "AMD gfx942",
        "AMD Instinct MI250X/MI250",
    ],
)
def test_a_name_that_is_not_listed_is_unknown_rather_than_guessed(name: str) -> None:
    assert find_accelerator(name) is None
    assert peak_flops(name, "bf16") is None


def test_no_key_is_listed_twice_and_cards_that_share_a_name_differ_in_memory() -> None:
    names = [(name.casefold(), row.memory_bytes) for row in ACCELERATORS for name in row.names]
    keys = [row.key for row in ACCELERATORS]
    assert len(set(names)) == len(names)
    assert len(set(keys)) == len(keys)


def test_cards_that_share_a_name_are_told_apart_by_their_memory_and_unknown_without_it() -> None:
    name = "NVIDIA GeForce RTX 3080"
    assert find_accelerator(name) is None
    assert find_accelerator(name, 10009 * MIB) is find_by_key("rtx-3080-10gb")
    assert find_accelerator(name, 12045 * MIB) is find_by_key("rtx-3080-12gb")
    peak = peak_flops(name, "bf16", memory_bytes=10009 * MIB)
    assert peak is not None
    assert peak.device == "rtx-3080-10gb"


def test_cards_that_differ_in_memory_alone_have_one_peak() -> None:
    assert bf16("NVIDIA GeForce RTX 4060 Ti") == pytest.approx(44.1e12, rel=0.01)
    assert find_accelerator("NVIDIA GeForce RTX 4060 Ti", 16380 * MIB) is find_by_key("rtx-4060-ti-16gb")
    assert find_accelerator("NVIDIA GeForce RTX 4060 Ti", 8188 * MIB) is find_by_key("rtx-4060-ti-8gb")


@pytest.mark.parametrize(
    ("name", "mebibytes", "key"),
    [
        ("NVIDIA H200", 143771, "h200"), ("NVIDIA A10G", 22515, "a10g"), ("Tesla T4", 14912, "t4"),
        ("NVIDIA GB200", 189471, "gb200"), ("NVIDIA A100-SXM4-80GB", 81050, "a100-80gb"),
        ("NVIDIA H20-3e", 143771, "h20-3e"), ("NVIDIA RTX 4000 Ada Generation", 20475, "rtx-4000-ada"),
        ("NVIDIA GeForce RTX 4090 D", 24564, "rtx-4090-d"),
    ],
)  # fmt: skip
def test_the_memory_that_drivers_report_suits_the_nominal_one(name: str, mebibytes: int, key: str) -> None:
    assert find_accelerator(name, mebibytes * MIB) is find_by_key(key)


def test_a_part_of_a_card_that_goes_by_the_name_of_the_whole_has_no_peak() -> None:
    assert peak_flops("NVIDIA A100-SXM4-80GB", "bf16", memory_bytes=9984 * MIB) is None
    assert find_accelerator("NVIDIA GeForce RTX 3050", 6144 * MIB) is None  # another chip than that with 8 GB


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA A10G", 70), ("NVIDIA A30", 165), ("NVIDIA H20", 148), ("NVIDIA GB200", 2500), ("NVIDIA GB300", 2500),
        ("NVIDIA H800", 989.4), ("NVIDIA A800-SXM4-80GB", 312), ("NVIDIA H20-3e", 148), ("NVIDIA A2", 18),
        ("NVIDIA A16", 17.9), ("NVIDIA GeForce RTX 4090 D", 147.1), ("NVIDIA RTX 4000 Ada Generation", 106.9),
        ("NVIDIA RTX A5000", 111.1), ("AMD Instinct MI300A", 980.6), ("AMD Radeon RX 7900 XTX", 122.8),
        ("AMD Instinct MI350X", 2306.9), ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 503.8),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", 440),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 480), ("NVIDIA GeForce RTX 3090 Ti", 80),
        ("NVIDIA GeForce RTX 3070", 40.6), ("NVIDIA GeForce RTX 3060 Ti", 32.4), ("NVIDIA GeForce RTX 4080", 97.5),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", 88.2), ("NVIDIA GeForce RTX 4070", 58.3),
        ("NVIDIA GeForce RTX 5080", 112.6), ("NVIDIA GeForce RTX 5060 Ti", 47.4), ("NVIDIA GeForce RTX 5050", 26.3),
    ],
)  # fmt: skip
def test_bf16_is_dense_and_accumulates_in_fp32(name: str, teraflops: float) -> None:
    assert bf16(name) == pytest.approx(teraflops * 1e12, rel=0.01)


@pytest.mark.parametrize(
    ("key", "cores", "megahertz"), [("rtx-5090", 21760, 2407), ("rtx-4090", 16384, 2520), ("rtx-3090", 10496, 1695)]
)
def test_the_formula_for_geforce_gives_what_the_white_papers_print(key: str, cores: int, megahertz: int) -> None:
    found = find_by_key(key)
    fp32 = 2 * cores * megahertz * 1e6
    for dtype, times in (("fp32", 1), ("tf32", 1), ("bf16", 2), ("fp16", 2)):
        assert found.peaks[dtype] == pytest.approx(times * fp32, rel=0.005)


@pytest.mark.parametrize("key", ["h100", "h100-pcie", "h100-nvl", "h200", "h200-nvl", "gh200"])
def test_dense_bf16_is_twice_tf32_on_hopper(key: str) -> None:
    peaks = find_by_key(key).peaks
    assert peaks["bf16"] == pytest.approx(2 * peaks["tf32"], rel=0.002)


@pytest.mark.parametrize("row", ACCELERATORS, ids=lambda row: row.key)
def test_every_row_is_plausible(row: Accelerator) -> None:
    """Catches a slipped decimal, a swapped column, and a sparse peak beside a dense one."""
    assert row.names
    assert row.source
    assert row.key == row.key.casefold().strip()
    assert 8 * 2**30 <= row.memory_bytes <= 288 * 2**30
    assert 0.2e12 <= row.memory_bandwidth <= 8e12
    assert row.peaks["fp32"] <= row.peaks.get("tf32", row.peaks["fp16"]) <= row.peaks["fp16"]
    assert 1.9 < row.peaks["fp16"] / row.peaks["fp32"] <= 32
    if "bf16" in row.peaks:
        assert row.peaks["bf16"] == row.peaks["fp16"]
    if "tf32" in row.peaks:
        assert row.peaks["fp16"] / row.peaks["tf32"] == pytest.approx(2, rel=0.02)


def test_amp_means_fp16_on_the_matrix_units_and_fp32_the_plain_peak() -> None:
    amp, plain = peak_flops("Tesla V100-SXM2-32GB", "amp"), peak_flops("Tesla V100-SXM2-32GB", "fp32")
    assert amp is not None
    assert plain is not None
    assert amp.dtype == "fp16"
    assert amp.flops_per_s == pytest.approx(125e12)
    assert plain.dtype == "fp32"
    assert plain.flops_per_s == pytest.approx(15.7e12)
    assert amp.device == "v100-32gb"
    assert amp.source == "NVIDIA V100 data sheet"


def test_the_v100_of_a_dgx_station_is_that_of_the_servers() -> None:
    assert find_accelerator("Tesla V100-DGXS-32GB") is find_accelerator("Tesla V100-SXM2-32GB") is not None
    assert find_accelerator("Tesla V100-DGXS-16GB") is find_accelerator("Tesla V100-SXM2-16GB") is not None


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("Tesla T4", "bf16"),
        ("Tesla T4", "tf32"),
        ("NVIDIA TITAN RTX", "bf16"),
        ("Quadro RTX 6000", "tf32"),
        ("AMD Instinct MI355X", "tf32"),
        ("AMD Instinct MI210", "tf32"),
    ],
)
def test_arithmetic_the_matrix_units_lack_has_no_peak(name: str, precision: str) -> None:
    assert find_accelerator(name) is not None
    assert peak_flops(name, precision) is None


def test_one_device_of_an_mi250x_is_one_of_its_two_dies() -> None:
    assert bf16("AMD Instinct MI250X") == pytest.approx(383e12 / 2)


def test_a_precision_that_does_not_exist_is_a_bug() -> None:
    with pytest.raises(KeyError):
        peak_flops("NVIDIA H200", "fp7")


@pytest.mark.parametrize(("key", "nearest"), [("h200x", "h200"), ("MI300", "mi300x"), ("rtx4090", "rtx-4090")])
def test_a_misspelt_key_is_answered_with_the_nearest(key: str, nearest: str) -> None:
    with pytest.raises(DeviceError, match=key) as caught:
        find_by_key(key)
    assert caught.value.hint is not None
    assert caught.value.hint.startswith(f"did you mean '{nearest}'")


def test_even_a_hopeless_key_is_answered_with_where_all_are_listed() -> None:
    with pytest.raises(DeviceError) as caught:
        find_by_key("?")
    assert caught.value.hint is not None
    assert caught.value.hint.endswith("gpubench memory --help lists all")


def test_rows_can_be_hashed_and_not_be_changed() -> None:
    row = find_by_key("h200")
    assert row in {row}
    with pytest.raises(FrozenInstanceError):
        row.key = "h300"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("precision", "matmul", "dtype"),
    [
        ("fp32", None, "fp32"), ("fp32", "highest", "fp32"), ("fp32", "high", "tf32"), ("fp32", "medium", "tf32"),
        ("tf32", None, "tf32"), ("tf32", "highest", "fp32"), ("bf16", "high", "bf16"), ("amp", "highest", "fp16"),
    ],
)  # fmt: skip
def test_the_peak_is_of_the_arithmetic_that_ran(precision: str, matmul: str | None, dtype: str) -> None:
    peak = peak_flops("NVIDIA A100-SXM4-80GB", precision, matmul)
    assert peak is not None
    assert peak.dtype == dtype


def test_without_tf32_units_float32_products_are_computed_in_full() -> None:
    peak = peak_flops("Tesla V100-SXM2-32GB", "fp32", "high")
    assert peak is not None
    assert peak.dtype == "fp32"
