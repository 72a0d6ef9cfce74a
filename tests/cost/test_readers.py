"""Each reader against a hand-written export with its format's oddities."""

from __future__ import annotations

import gzip
import json

import pytest

from kvsim.cost.load import detect, load
from kvsim.errors import BadProfile, WrongUse
from tests.cost import exports
from tests.cost.exports import annotation, kernel, kineto, launch, nsys_sqlite


@pytest.fixture
def put(tmp_path):
    """Writes an export -> its path."""

    def write(name, content):
        path = tmp_path / name
        if isinstance(content, list | dict):
            content = json.dumps(content)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


@pytest.fixture
def geometry(put):
    return put("geometry.json", exports.GEOMETRY)


def rows(path, **told):
    found = load([path], **told)
    return found.samples.to_dicts(), found.files[0]


# ------------------------------------------------------------------------------------------------ Nsight Compute
def test_ncu_of_2025(put, geometry):
    [row], about = rows(put("details.csv", exports.NCU_2025), geometry=geometry, batch=2, context=512)
    assert (row["class"], row["variant"], row["n"], row["cache"]) == ("dense_attn", "flash_fwd_splitkv_kernel", 1, "cold")
    assert row["t_us"] == 9096.6  # a thousands separator, and not the 41.5 % or 412.3 Gbyte/s of the same name
    assert row["bytes_measured"] == 2_330_000 + 1024
    assert row["bytes"] == 2 * 512 * 8 * 256 * 2 + 2 * 32 * 256 * 2
    assert about["format"] == "ncu"
    assert about["left_out"] == {
        "kernel of no class": 1,
        "launch without a duration": 1,
        "line of the profiler or the program": 3,
    }
    assert about["unclassed_share"] == pytest.approx(0.9 / 9097.5)


def test_ncu_the_second_launch_of_split_kv_reads_no_cache(put, geometry):
    text = exports.NCU_2025.replace("splitkv_kernel", "splitkv_combine_kernel")
    [row], _ = rows(put("details.csv", text), geometry=geometry, batch=2, context=512)
    assert (row["class"], row["bytes"]) == ("dense_attn", None)


def test_ncu_of_2023_has_cycles_and_a_clock(put):
    [row], _ = rows(put("old.csv", exports.NCU_2023))
    assert row["t_us"] == pytest.approx(12904 / 1.29e9 * 1e6)
    assert row["bytes_measured"] == 32770


def test_ncu_raw_page_has_a_row_of_units(put):
    found, about = rows(put("raw.csv", exports.NCU_RAW))
    assert [r["t_us"] for r in found] == [48.2, 1093.5]
    assert [r["bytes_measured"] for r in found] == [134_712_000, 268_912_000]
    assert about["left_out"] == {}


def test_ncu_durations_that_disagree_are_conflicting(put):
    line = exports.NCU_2025.splitlines()[7]
    again = line.replace("GPU Speed Of Light Throughput", "Command line profiler metrics").replace(
        "Duration", "gpu__time_duration.sum"
    )
    [row], about = rows(put("twice.csv", exports.NCU_2025 + again.replace("9,096.60", "8,000.0") + "\n"))
    assert (row["t_us"], row["status"]) == (8000.0, "conflicting")
    assert about["rows"]["conflicting"] == 1


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"us","9,096.60"', '"us","9.096,60"', r"row 8, column Metric Value: '9\.096,60' is not a number .*LC_ALL=C"),
        ('"us","9,096.60"', '"us","9,09"', r"row 8, column Metric Value: '9,09' is not a number"),
        ('"us","9,096.60"', '"lightyear","1"', "row 8, column Metric Value: unit 'lightyear' is no time"),
        ('"Mbyte","2.33"', '"Mbit","2.33"', "row 4, column Metric Value: unit 'Mbit' where byte"),
    ],
)
def test_ncu_refuses_what_does_not_parse(put, old, new, said):
    with pytest.raises(BadProfile, match=said):
        load([put("bad.csv", exports.NCU_2025.replace(old, new))])


def test_ncu_with_nothing_but_the_profilers_errors(put):
    with pytest.raises(BadProfile, match="no row that begins with ID"):
        load([put("raw.csv", "==ERROR== Failed to find metrics\n==ERROR== Failed\n")])


# ------------------------------------------------------------------------------------------------ Nsight Systems
def test_nsys_kernel_summary(put):
    found, about = rows(put("kern.csv", exports.NSYS_CSV), batch=4, context=4096)
    assert [(r["variant"], r["t_us"], r["n"]) for r in found] == [
        ("flash::flash_fwd_splitkv_kernel", 5500.0, 1000),
        ("flash::flash_fwd_splitkv_combine_kernel", 3200.0, 1000),
    ]
    assert {(r["batch"], r["context"], r["bytes"]) for r in found} == {(4, 4096, None)}
    assert about["left_out"] == {"kernel of no class": 1, "line of the profiler": 2}
    assert about["unclassed_share"] == pytest.approx(100 / 8800)


def test_nsys_refuses_units_and_missing_columns(put):
    with pytest.raises(BadProfile, match=r"row 4, column Total Time \(fortnight\): unit 'fortnight'"):
        load([put("a.csv", exports.NSYS_CSV.replace("Total Time (ns)", "Total Time (fortnight)"))])
    with pytest.raises(BadProfile, match="row 3: no column Name"):
        load([put("b.csv", exports.NSYS_CSV.replace(",Name", ",Label"))], format="nsys")


def test_nsys_sqlite(tmp_path):
    found, about = rows(nsys_sqlite(tmp_path / "run.sqlite"))
    attention, gemm, copies = found
    assert (attention["t_us"], attention["n"], attention["variant"]) == (
        15.0,
        2,
        "flash_fwd_kernel",
    )  # not 20: two kernels overlap
    assert (gemm["class"], gemm["t_us"]) == ("rest", 1.0)
    assert (copies["class"], copies["bytes"], copies["n"], copies["t_us"]) == ("host_fetch", 2 * 884736, 2, 36.0)
    assert copies["status"] == "impossible"  # 49 GB/s over a link of 32
    assert about["facts"]["bandwidth_bytes_s"] == 1_555_200_000_000
    assert about["gpu"] == "NVIDIA A100 SXM4 40GB"
    assert about["left_out"] == {
        "copy of another kind, or of nothing": 1,
        "kernel that ends before it starts, or has no times": 1,
    }


def test_nsys_sqlite_without_kernels(tmp_path):
    found, about = rows(nsys_sqlite(tmp_path / "empty.sqlite", kernels=False))
    assert found == []
    assert "no kernel table" in about["notes"][0]
    (tmp_path / "cut.sqlite").write_bytes((tmp_path / "empty.sqlite").read_bytes()[:300])
    with pytest.raises(BadProfile, match="not a readable Nsight Systems export"):
        load([tmp_path / "cut.sqlite"])


# ------------------------------------------------------------------------------------------------ PyTorch
def test_kineto_decode_step(put, geometry):
    found, about = rows(put("t.json", exports.DECODE), geometry=geometry)
    step = {r["class"]: r for r in found if r["batch"] == 32}
    assert step["dense_attn"]["t_us"] == 60.0  # 70 in sum, 10 of them twice
    assert (step["dense_attn"]["n"], step["dense_attn"]["context"], step["dense_attn"]["layers"]) == (2, 1024, 36)
    assert step["dense_attn"]["bytes"] == 36 * (32768 * 8 * 256 * 2 + 32 * 32 * 256 * 2)
    assert (step["dense_attn"]["graph"], step["rest"]["t_us"]) == ("full", 100.0)
    [outside] = [r for r in found if r["batch"] is None and r["status"] == "ok"]
    assert (outside["t_us"], outside["graph"]) == (30.0, "eager")
    assert sorted(r["t_us"] for r in found if r["status"] == "impossible") == [4.0, 9e15]
    assert about["left_out"]["kernel of an impossible duration (kept as a row of its own)"] == 2
    assert about["unclassed_share"] == pytest.approx(15 / 215)
    assert "200.0 µs in sum, 190.0 µs with overlaps counted once" in about["notes"][1]
    assert about["gpu"] == "NVIDIA H100 SXM5 80GB"


def test_kineto_gzipped_and_as_a_bare_list(put, geometry):
    plain, _ = rows(put("t.json", exports.DECODE), geometry=geometry)
    packed, _ = rows(put("t.json.gz", gzip.compress(json.dumps(exports.DECODE).encode())), geometry=geometry)
    bare, about = rows(put("bare.json", exports.DECODE["traceEvents"]), geometry=geometry)
    for found in (packed, bare):
        assert [r["t_us"] for r in found] == [r["t_us"] for r in plain]
    assert about["gpu"] is None


def test_kineto_two_steps_are_two_rows(put):
    other = exports.STEP_32.replace("32768", "65536")
    steps = [annotation(exports.STEP_32, 0, 50), annotation(other, 100, 50), launch(10, 1), launch(110, 2)]
    trace = kineto(
        *steps, kernel("flash_fwd_kernel", 60, 5.0, 1, grid=False), kernel("flash_fwd_kernel", 160, 9.0, 2, grid=False)
    )
    found, _ = rows(put("two.json", trace))
    assert [(r["context"], r["t_us"]) for r in found] == [(1024, 5.0), (2048, 9.0)]


def test_kineto_a_step_that_also_prefills_is_no_decode_step(put):
    mixed = exports.STEP_32.replace("context_0(sq0sk0", "context_2(sq64sk64")
    found, about = rows(
        put("m.json", kineto(annotation(mixed, 0, 50), launch(10, 1), kernel("flash_fwd_kernel", 60, 5.0, grid=False)))
    )
    assert [(r["batch"], r["t_us"]) for r in found] == [(None, 5.0)]
    assert "1 of them in no annotated decode step" in about["notes"][-1]


@pytest.mark.parametrize("old", ["generation_32", "sk32768sqsq"])
def test_kineto_a_number_that_no_batch_has_is_no_annotation(put, old):
    name = exports.STEP_32.replace(old, old.replace("32", "9" * 400))
    assert name != exports.STEP_32
    found, _ = rows(
        put("m.json", kineto(annotation(name, 0, 50), launch(10, 1), kernel("flash_fwd_kernel", 60, 5.0, grid=False)))
    )
    assert [(r["batch"], r["t_us"]) for r in found] == [(None, 5.0)]


def test_kineto_a_time_that_no_float_holds_is_none(put):
    late = kernel("flash_fwd_kernel", 60, 10**400, grid=False)
    found, about = rows(put("m.json", kineto(kernel("flash_fwd_kernel", 10, 5.0, grid=False), late)))
    assert [r["t_us"] for r in found] == [5.0]
    assert about["left_out"]["kernel of an impossible duration (kept as a row of its own)"] == 1


@pytest.mark.parametrize(
    "content",
    [b'{"traceEvents": [', b'{"traceEvents": 3}', gzip.compress(b'{"traceEvents": []}', mtime=0)[:-9]],
    ids=["cut", "number", "gzip cut"],
)
def test_kineto_cut_short(put, content):
    with pytest.raises(BadProfile, match=r"t\.json"):
        load([put("t.json", content)])


# ------------------------------------------------------------------------------------------------ Triton and tables
def test_proton(put):
    [row], about = rows(put("p.json", exports.PROTON))
    assert (row["class"], row["variant"], row["t_us"], row["n"], row["bytes"]) == (
        "dense_attn",
        "attn_fwd",
        204.8,
        10,
        100_000_000,
    )
    assert about["left_out"] == {"frame without a time": 2, "kernel of no class": 1}
    assert about["unclassed_share"] == 0.5
    assert about["facts"]["bandwidth_bytes_s"] == pytest.approx(1008.096e9)
    with pytest.raises(BadProfile, match="not one of proton's"):
        load([put("q.json", [{"frame": {"name": "ROOT"}, "children": [{"metrics": {}}]}])])


@pytest.mark.parametrize("metric", ["time (ns)", "count", "bytes"])
@pytest.mark.parametrize("value", [float("inf"), float("nan"), 10**400, -(10**400)], ids=["inf", "nan", "huge", "minus"])
def test_proton_a_metric_that_no_float_holds(put, metric, value):
    metrics = {"time (ns)": 2048.0, "count": 1, "bytes": 10} | {metric: value}
    with pytest.raises(BadProfile, match="not one of proton's"):
        load([put("q.json", [{"frame": {"name": "attn_fwd"}, "metrics": metrics}])])


def test_aic_rows_are_marked(put):
    found, about = rows(put("generation.csv", exports.AIC))
    assert [r["status"] for r in found] == ["ok", "ok", "impossible", "conflicting", "conflicting", "l2_hot"]
    assert about["left_out"] == {"row without a latency": 1}
    first, window, *_ = found
    assert (first["context"], first["t_us"], first["kv_bits"]) == (1024, 50.0, 16)
    assert first["bytes"] == 4 * 1024 * 8 * 256 * 2 + 4 * 32 * 256 * 2
    assert (window["variant"], window["kv_bits"], window["context"]) == ("VLLM 0.19.0 vllm_flash_attn window 128", 8, 1024)
    assert window["bytes"] == 4 * 128 * 8 * 256 + 4 * 32 * 256 * 2
    with pytest.raises(BadProfile, match="row 2, column kv_cache_dtype: 'fp3'"):
        load([put("bad.csv", exports.AIC.replace(",fp8,", ",fp3,"))])
    with pytest.raises(BadProfile, match="not a table of AIConfigurator"):
        load([put("bad.csv", exports.AIC.replace("batch_size", "size"))])


def test_llmservingsim(put, geometry):
    [row], about = rows(put("attention.csv", exports.LLMSERVINGSIM), geometry=geometry, gpu="rtx4090")
    assert (row["batch"], row["context"], row["t_us"], row["kv_heads"]) == (4, 1024, 25.5, 8)
    assert row["bytes"] == 4 * 1024 * 8 * 256 * 2 + 4 * 32 * 256 * 2
    assert about["left_out"] == {"row with a prefill chunk, or without decode": 2}
    [row], about = rows(put("attention.csv", exports.LLMSERVINGSIM))
    assert row["bytes"] is None  # heads are never guessed
    assert "without --geometry" in about["notes"][0]
    with pytest.raises(BadProfile, match=r"row 2, column time_us: '25,5'"):
        load([put("b.csv", exports.LLMSERVINGSIM.replace("1024,25.5", '1024,"25,5"'))])


def test_a_number_that_no_table_of_samples_holds_is_named(put):
    with pytest.raises(BadProfile, match=r"huge\.csv.*: context is 2e\+33, expected a number up to 9\.2e\+18"):
        load([put("huge.csv", exports.LLMSERVINGSIM.replace("1024,25.5", "2e33,25.5"))])


# ------------------------------------------------------------------------------------------------ all of them
EXPORTS = {
    "ncu": exports.NCU_2025, "nsys": exports.NSYS_CSV, "kineto": exports.DECODE, "proton": exports.PROTON, "aic": exports.AIC,
    "llmservingsim": exports.LLMSERVINGSIM,
}  # fmt: skip


@pytest.mark.parametrize("format", EXPORTS)
def test_a_file_is_known_by_what_is_in_it(put, format):
    path = put("some.file", EXPORTS[format])
    assert detect(path, path.read_bytes()) == format


@pytest.mark.parametrize("format", EXPORTS)
def test_no_host_user_or_path_is_copied(put, format):
    found = load([put("some.file", EXPORTS[format])])
    kept = found.samples.write_csv() + json.dumps(found.files)
    assert not [secret for secret in exports.SECRETS if secret in kept]


def test_no_host_user_or_path_is_copied_from_sqlite(tmp_path):
    found = load([nsys_sqlite(tmp_path / "run.sqlite")])
    kept = found.samples.write_csv() + json.dumps(found.files)
    assert not [secret for secret in (*exports.SECRETS, str(tmp_path)) if secret in kept]


@pytest.mark.parametrize("content", [b"hello\n", b"a,b\n1,2\n", b"{}", b"\x00\x01\x02", b""])
def test_an_unknown_format_is_one_line(put, content):
    with pytest.raises(BadProfile, match=r"x\.bin: of no format that kvsim reads; name it with --format"):
        load([put("x.bin", content)])
    with pytest.raises(WrongUse, match="unknown format 'excel'"):
        load([put("x.bin", content)], format="excel")


def test_rules_of_the_user_come_first(put):
    own = put("own.toml", '[[rule]]\nclass = "gather_attn"\nmatch = "my_odd"\n[[rule]]\nclass = "rest"\nmatch = "splitkv"\n')
    found, about = rows(put("kern.csv", exports.NSYS_CSV), classes=own)
    assert [r["class"] for r in found] == ["rest", "rest", "gather_attn"]
    assert about["unclassed_share"] == 0
    for text, said in {
        '[[rule]]\nclass = "magic"\nmatch = "x"': "rule 1: expected class",
        '[[rule]]\nclass = "rest"\nmatch = "("': "rule 1: match is no regular expression",
        "[[rule": "not TOML",
    }.items():
        with pytest.raises(WrongUse, match=rf"own\.toml.*{said}"):
            load([put("kern.csv", exports.NSYS_CSV)], classes=put("own.toml", text))


def test_a_geometry_is_checked(put):
    for change, said in (
        ({"layers": 0}, "whole numbers above 0"),
        ({"dtype": "fp3"}, "dtype 'fp3'"),
        ({"kv_heads": 5}, "do not divide"),
    ):
        bad = put("g.json", json.loads(exports.GEOMETRY) | change)
        with pytest.raises(WrongUse, match=said):
            load([put("a.csv", exports.LLMSERVINGSIM)], geometry=bad)


FAULTS = [
    ("kern.csv", "nsys", "Name\n", "no column Total Time"),
    ("a.csv", "llmservingsim", exports.LLMSERVINGSIM.replace("n_decode", "n"), "no column n_decode"),
    ("p.json", "proton", "{}", "not a tree of frames"),
    ("t.json", "kineto", "[3]", "no list of traceEvents"),
    ("run.sqlite", "nsys-sqlite", "no database", "not a readable Nsight Systems export"),
    ("g.csv", "aic", "a,b\n1,2\n", "not a table of AIConfigurator"),
]


@pytest.mark.parametrize(("name", "format", "content", "said"), FAULTS)
def test_a_file_of_another_format_than_named_is_one_line(put, name, format, content, said):
    with pytest.raises(BadProfile, match=said):
        load([put(name, content)], format=format)


def test_events_without_names_or_arguments_do_not_stop_a_trace(put):
    bare = {"ph": "X", "cat": "kernel", "ts": 5, "dur": 2.0, "args": None}
    found, about = rows(put("t.json", kineto(bare, kernel("flash_fwd_kernel", 10, 4.0))))
    assert [r["t_us"] for r in found] == [4.0]
    assert about["unclassed_share"] == pytest.approx(2 / 6)
