"""What a member with a key can send: each attack ends in "refused by name, the others go on, memory bounded"."""

from __future__ import annotations

import io
import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed (the extra `flower`)")

from consortium import NAMES, Consortium
from fake_grid import FakeNode, RecordingCallback, consortium, drive, fast_polling, make_grid  # noqa: F401  (fixtures)
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.supercore.inflatable import inflatable_utils
from flwr.supercore.inflatable.inflatable_object import add_header_to_object_body, get_object_id

from fedmll.core.errors import ConfigError, ReplyRejected
from fedmll.core.message import Message
from fedmll.deploy.flower.client_app import EVALUATE, HELLO, MODEL, TRAIN
from fedmll.deploy.flower.records import ArraySizeLimit, from_records, to_records
from fedmll.deploy.flower.reply_checks import cap_shares
from fedmll.deploy.introduction import Introduction
from fedmll.deploy.server import serve
from fedmll.deploy.server.server_settings import ServerSettings
from fedmll.deploy.server.site_federation import build_federation, load_server_data
from fedmll.deploy.site import worker
from fedmll.methods.framework.base import TensorSpec
from fedmll.methods.framework.method import MethodAggregator
from fedmll.methods.parts.averaging import WeightedAverageAggregator
from fedmll.runs.run_folder import RunFolder
from fedmll.training import round_loop

Change = Callable[[RecordDict], RecordDict]


def npy(values: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, values)
    return buffer.getvalue()


def header(text: str, values: bytes = b"\0" * 8) -> bytes:
    """A .npy file with a header of one's own."""
    line = text.encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(line).to_bytes(2, "little") + line + values


def holding(**arrays: Array) -> RecordDict:
    records = to_records(Message({}, {"samples": 1, "loss": 1}), {"name": "site-b"})
    records["tensors"] = ArrayRecord(arrays)
    return records


PLAIN = "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }"
TEN_TERABYTES = header("{'descr': '<f4', 'fortran_order': False, 'shape': (10000000000000,), }")
ARRAYS = [
    (Array("float32", (2,), "numpy.ndarray", header("{'descr': '<f4', 'shape': (2,")), "header"),
    (Array("float32", (2,), "numpy.ndarray", header("(" * 500)), "header"),
    (Array("float32", (2,), "numpy.ndarray", header("{'descr': '<f4', 'fortran_order': 1/0, 'shape': (2,), }")), "hea"),
    (Array("float32", (2,), "numpy.ndarray", header(PLAIN)[:30]), "header"),
    (Array("float32", (2,), "numpy.ndarray", b"\x93NUMPY\x01\x00\xff\xff" + b" " * 70000), "header"),
    (Array("float32", (2,), "numpy.ndarray", b"\x93NUMPY\x03\x00\x10\x00\x00\x00"), "no array"),
    (Array("float32", (2,), "numpy.ndarray", b""), "no array"),
    (Array("float32", (2,), "numpy.ndarray", header(PLAIN, b"\0" * 7)), "has 7 bytes"),
    (Array("float32", (2,), "numpy.ndarray", header(PLAIN, b"\0" * 9)), "has 9 bytes"),
    (Array("float32", (10**13,), "numpy.ndarray", TEN_TERABYTES), "not torch.float32"),
    (Array("float32", (2,), "numpy.ndarray", TEN_TERABYTES), "claims float32"),
    (Array("float64", (2,), "numpy.ndarray", npy(np.zeros(2))), "is torch.float64"),
]


@pytest.mark.parametrize(("array", "reason"), ARRAYS)
def test_an_array_is_checked_before_anything_is_allocated(array: Array, reason: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ReplyRejected, match=reason):
            from_records(holding(weights=array), {"weights": TensorSpec((2,))})
        with pytest.raises(
            ReplyRejected, match=r"has|header|no array|claims|is torch|cannot"
        ):  # also who expects anything
            from_records(holding(weights=replace(array, dtype="float32")))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_ordinary_arrays_are_read_as_numpy_does() -> None:
    for values in (np.arange(6.0).reshape(2, 3), np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.float32(3)[None],
                   np.array(7, np.int64), np.zeros((0, 3), np.int8), np.array([[True, False]])):  # fmt: skip
        found, _ = from_records(holding(x=Array(np.asanyarray(values))))
        assert np.array_equal(found["x"].numpy(), values)
        assert found["x"].numpy().dtype == values.dtype
    version_2 = npy(np.arange(2.0))
    version_2 = b"\x93NUMPY\x02\x00" + version_2[8:10] + b"\0\0" + version_2[10:]
    assert from_records(holding(x=Array("float64", (2,), "numpy.ndarray", version_2)))[0]["x"].tolist() == [0, 1]


def test_subnormal_numbers_become_0_and_invalid_booleans_are_rejected() -> None:
    small = np.array([1e-40, -1e-44, 1e-30, 0.5], np.float32)
    records = holding(x=Array(small))
    records["numbers"] = MetricRecord({"loss": 1e-310, "samples": 2.0})
    found, _ = from_records(records)
    assert found["x"].tolist() == [0.0, 0.0, float(small[2]), 0.5]
    assert found.numbers == {"loss": 0.0, "samples": 2.0}
    two = header("{'descr': '|b1', 'fortran_order': False, 'shape': (2,), }", b"\x01\x02")
    with pytest.raises(ReplyRejected, match="neither true nor false"):
        from_records(holding(x=Array("bool", (2,), "numpy.ndarray", two)))


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000, '{"a":' * 100_000, '{"a": [[[[[[1]]]]]]}', '{"a": "' + "x" * (1 << 20) + '"}', "1" * 5000, "{",
        '{"a": 1' + "0" * 5000 + "}", "\ud800",
    ],
    ids=range(8),
)  # fmt: skip
def test_json_is_bounded(text: str) -> None:
    records = holding()
    records["info"] = ConfigRecord({"json": text})
    with pytest.raises(ReplyRejected, match="cannot be read"):
        from_records(records)


def test_a_chunk_that_is_listed_a_million_times_is_not_assembled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inflatable_utils, "inflatable_class_registry", dict(inflatable_utils.inflatable_class_registry))
    bounds = ArraySizeLimit()
    bounds.install()
    honest = Array(np.zeros(250_000, np.float32))
    ((name, chunk),) = honest.slice_array()
    told = json.dumps({"dtype": "float32", "shape": [10**13], "stype": "numpy.ndarray", "arraychunk_ids": [0] * 10**6})
    contents = {name: chunk.deflate()}
    for body in (None, told):
        content = honest.deflate() if body is None else add_header_to_object_body(body.encode(), honest)
        key = get_object_id(content)
        with pytest.raises(ValueError, match="0 are expected"):
            ArraySizeLimit.inflate(ArraySizeLimit(), content, {name: chunk})
        bounds.allow(1_000_000)
        if body is None:
            found = inflatable_utils.inflate_object_from_contents(key, contents | {key: content})
            assert np.array_equal(found.numpy(), honest.numpy())  # type: ignore[attr-defined]
        else:
            with pytest.raises(ValueError, match="arrays of 1000128000000 bytes; at most 1000000 are expected"):
                bounds.start_message()
                inflatable_utils.inflate_object_from_contents(key, contents | {key: content})


def test_a_chunk_that_many_arrays_list_is_not_assembled_for_each_of_them() -> None:
    """One chunk of 1 MB and 1,000 small arrays that consist of it would become 1 GB."""
    limit, honest = ArraySizeLimit(), Array(np.zeros(250_000, np.float32))
    limit.allow(1_000_000)
    ((name, chunk),) = honest.slice_array()

    def assemble(count: int) -> None:
        limit.start_message()
        for number in range(count):
            values = {"dtype": "float32", "shape": [number], "stype": "numpy.ndarray", "arraychunk_ids": [0]}
            content = add_header_to_object_body(json.dumps(values).encode(), honest)
            limit.inflate(content, {name: chunk})

    assemble(1)
    assemble(1)  # of the next message
    with pytest.raises(ValueError, match="arrays of 1996160 bytes; at most 1000000 are expected"):
        assemble(1000)


def test_brackets_in_a_string_do_not_count_as_nesting() -> None:
    info = {"name": 'a "[[[[[[[[[[" \\', "deep": [[{"x": [1]}]]}
    assert from_records(to_records(Message(), info))[1] == info


# ---- in a run: site-b has a key and is not honest


def attacked(
    consortium: Consortium,  # noqa: F811
    folder: Path,
    kind: str,
    change: Change,
    rounds: int = 2,
    **more: Any,
) -> tuple[round_loop.Result, RecordingCallback]:
    """A run in which site-b's replies of one kind are changed. The sites send metrics of few images too."""
    grid, hear = make_grid(consortium, folder, min_count=1), RecordingCallback()

    def tamper(node: FakeNode, sent: FlowerMessage, reply: FlowerMessage) -> FlowerMessage:
        if node.name != "site-b" or sent.metadata.message_type != kind:
            return reply
        return FlowerMessage(change(reply.content), reply_to=sent)

    grid.tamper = tamper
    result = drive(consortium, grid, folder / "out", hear, min_clients=2, training__rounds=rounds, **more)
    return result, hear


def changed_reply(**changes: Any) -> Change:
    """The reply with other numbers, tensors or words."""

    def change(content: RecordDict) -> RecordDict:
        message, info = from_records(content)
        numbers = {n: v for n, v in {**message.numbers, **changes.get("numbers", {})}.items() if v is not None}
        tensors = message.tensors | {n: f(message.tensors) for n, f in changes.get("tensors", {}).items()}
        return to_records(Message(tensors, numbers), info | changes.get("info", {}))

    return change


def other_weights(data: bytes, shape: tuple[int, ...]) -> Change:
    def change(content: RecordDict) -> RecordDict:
        content["tensors"] = ArrayRecord({"weights": Array("float32", shape, "numpy.ndarray", data)})
        return content

    return change


def with_text(text: str) -> Change:
    def change(content: RecordDict) -> RecordDict:
        content["info"] = ConfigRecord({"json": text})
        return content

    return change


def negative_variance(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    weights = tensors["weights"].clone()
    weights[-1] = -0.01  # the last buffer of the network is a variance
    return weights


TRAINING: list[tuple[Change, str]] = [
    (other_weights(TEN_TERABYTES, (10**13,)), "weights is torch.float32"),
    (other_weights(header("{'descr': '<f4', "), (2,)), "weights is torch.float32"),
    (with_text("[" * 100_000), "too long or too deep"),
    (changed_reply(numbers={"samples": 1e12}), "it claims 1e+12 images and joined with 70"),
    (changed_reply(numbers={"samples": 71.0}), "it claims 71 images and joined with 70"),
    (changed_reply(numbers={"loss": 1e308}), "a loss of 1e+308"),
    (changed_reply(numbers={"loss": float("nan")}), "not finite"),
    (changed_reply(numbers={"loss": None}), "does not state its loss"),
    (changed_reply(numbers={"round": 7.0}), "unknown key"),
    (changed_reply(tensors={"weights": lambda t: -15 * t["weights"]}), "moved by the norm"),
    (changed_reply(tensors={"weights": negative_variance}), "negative variance"),
    (changed_reply(info={"name": "site-a"}), "calls itself by another name"),
    (changed_reply(info={"name": [["\x1b[31m"] * 3]}), "calls itself by another name"),
    (changed_reply(info={"error": "\x1b]0;owned\x07" + "x" * 100_000}), "an error that this server does not know"),
]


@pytest.mark.parametrize(("change", "reason"), TRAINING, ids=[reason for _, reason in TRAINING])
def test_an_invalid_reply_is_rejected_and_the_round_continues_with_the_others(
    consortium: Consortium,  # noqa: F811
    tmp_path: Path,
    change: Change,
    reason: str,
) -> None:
    result, hear = attacked(consortium, tmp_path, TRAIN, change, rounds=1)
    assert [row["clients"] for row in hear.rows] == [2]
    refusals = [text for text in hear.said if "rejected" in text]
    assert len(refusals) == 1
    assert refusals[0].startswith("round 1: the reply of site-b is rejected: ")
    assert reason in refusals[0]
    assert len(refusals[0]) < 600
    assert refusals[0].isprintable()
    assert 0 < result.rows[0]["loss"] < 10


def test_the_attack_with_a_negative_variance_has_one(consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
    """So that the test above refuses what it means to."""
    result, _ = attacked(consortium, tmp_path, TRAIN, lambda content: content, rounds=1)
    variances = [name for name in result.weights if name.endswith("running_var")]
    assert variances
    assert all(bool((result.weights[name] > 0).all()) for name in variances)


HONEST = {"samples": 70, "held_out": 0, "classes": ["digit-1"], "digest": "0" * 32}


@pytest.mark.parametrize(
    "changed",
    [
        {"samples": 10**12}, {"samples": True}, {"samples": 0}, {"samples": 5.0}, {"samples": "5"},
        {"held_out": 10**12}, {"held_out": False}, {"held_out": -1}, {"classes": ["a", "a"]},
        {"classes": [["a"]]}, {"classes": "a"}, {"classes": []},
        {"digest": "0" * 31}, {"digest": 3},
    ],
    ids=str,
)  # fmt: skip
def test_impossible_introductions_are_rejected(changed: dict[str, Any]) -> None:
    assert Introduction.from_json(HONEST).samples == 70
    with pytest.raises(ReplyRejected):
        Introduction.from_json(HONEST | changed)


def test_an_introduction_with_a_trillion_images_does_not_stop_the_others(
    consortium: Consortium,  # noqa: F811
    tmp_path: Path,
) -> None:
    grid, hear = make_grid(consortium, tmp_path), RecordingCallback()
    lies = iter([{"samples": 10**12}, {"samples": True}, {"frozen": {"x": [10**400]}}, {"classes": {}}])

    def tamper(node: FakeNode, sent: FlowerMessage, reply: FlowerMessage) -> FlowerMessage:
        if node.name != "site-b" or sent.metadata.message_type != HELLO:
            return reply
        return FlowerMessage(changed_reply(info=next(lies, {}))(reply.content), reply_to=sent)

    grid.tamper = tamper
    drive(consortium, grid, tmp_path / "out", hear, training__rounds=1, join_timeout=30.0)
    assert [text for text in hear.said if "site-b is rejected: it claims 1000000000000 training images" in text]
    assert "site-b has joined: 70 images, 10 annotated classes" in hear.said  # when it has come to its senses
    assert hear.rows[0]["clients"] == 3


def test_a_federation_of_many_images_occupies_no_memory(consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
    known = {name: Introduction(samples=10**8, held_out=0, classes=("digit-1",), digest="0" * 32) for name in NAMES}
    mine = load_server_data(consortium.server(), RecordingCallback())
    tracemalloc.start()
    try:
        federation = build_federation(consortium.server(), ServerSettings(clients=NAMES), known, mine)
        assert federation.sizes.tolist() == [10**8] * 3
        assert len(federation.participants(1)) == 3
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    (tmp_path / "sites.json").write_text('{"site-a": [')
    with pytest.raises(ConfigError, match=r"sites\.json, the description of each client's data, cannot be read"):
        RunFolder(tmp_path / "out").create(consortium.server())
        (tmp_path / "sites.json").rename(tmp_path / "out" / "sites.json")
        drive(consortium, make_grid(consortium, tmp_path), tmp_path / "out")


@pytest.mark.parametrize(
    ("sizes", "share"), [((10, 10, 980), 0.4), ((500, 400, 50, 50), 0.3), ((5, 4, 3), 0.5), ((7, 1, 1, 1), 0.25)]
)
def test_no_share_is_above_the_limit(sizes: tuple[int, ...], share: float) -> None:
    found = np.array(cap_shares(sizes, share))
    assert (found / found.sum() <= share + 1e-9).all()
    lowered = found < sizes
    assert np.allclose(found[lowered] / found.sum(), share)  # no lower than needed
    assert np.array_equal(found[~lowered], np.array(sizes, float)[~lowered]) or share * len(sizes) <= 1
    assert cap_shares(sizes, 1.0) == [float(size) for size in sizes]
    assert cap_shares((9, 1), 0.4) == [1.0, 1.0]  # not possible: alike


def test_max_share_caps_every_average_by_size(consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
    """Sizes 90, 70 and 50: a share of 0.36 lowers site-a and site-b to 64.3."""
    experiment = consortium.server(training__rounds=1)
    RunFolder(tmp_path / "out").create(experiment)
    hear, replies = RecordingCallback(), dict[str, torch.Tensor]()
    grid = make_grid(consortium, tmp_path)

    def listen(node: FakeNode, sent: FlowerMessage, reply: FlowerMessage) -> FlowerMessage:
        if sent.metadata.message_type == TRAIN:
            replies[node.name] = from_records(reply.content)[0]["weights"].double()
        return reply

    grid.tamper = listen
    server = ServerSettings(clients=NAMES, min_clients=3, round_timeout=5, join_timeout=2, max_share=0.36)
    result = serve.run_federation(grid, experiment, server, tmp_path / "out", callback=hear)
    level = 0.36 * 50 / (1 - 2 * 0.36)
    mean = (level * replies["site-a"] + level * replies["site-b"] + 50 * replies["site-c"]) / (2 * level + 50)
    bias = result.weights["head.bias"]
    place = int((mean.float() == bias[0]).nonzero()[0]) if bool((mean.float() == bias[0]).any()) else -1
    assert place >= 0
    assert torch.allclose(mean.float()[place : place + len(bias)], bias, atol=1e-7)
    with pytest.raises(ConfigError, match="--max-share 0 is not a share"):
        ServerSettings(clients=NAMES, max_share=0)


def test_max_share_does_not_change_the_steps_that_fednova_counts(
    consortium: Consortium,  # noqa: F811
    tmp_path: Path,
) -> None:
    """w_g − (Σ p_i a_i) Σ p_i (w_g − w_i)/a_i, with a_i from the real sizes 90, 70 and 50 in batches of 16."""
    settings = {"method__name": "fednova", "training__optimizer": "sgd", "training__lr": 0.1, "training__rounds": 1}
    experiment = consortium.server(**settings)
    RunFolder(tmp_path / "out").create(experiment)
    grid, replies, start = make_grid(consortium, tmp_path), dict[str, torch.Tensor](), list[torch.Tensor]()

    def listen(node: FakeNode, sent: FlowerMessage, reply: FlowerMessage) -> FlowerMessage:
        if sent.metadata.message_type == TRAIN:
            start.append(from_records(sent.content)[0]["weights"].double())
            replies[node.name] = from_records(reply.content)[0]["weights"].double()
        return reply

    grid.tamper = listen
    server = ServerSettings(clients=NAMES, min_clients=3, round_timeout=5, join_timeout=2, max_share=0.36)
    result = serve.run_federation(grid, experiment, server, tmp_path / "out", callback=RecordingCallback())
    shares = torch.tensor([0.36, 0.36, 0.28], dtype=torch.float64)
    steps = torch.tensor([6.0, 5.0, 4.0], dtype=torch.float64)  # ⌈90/16⌉, ⌈70/16⌉, ⌈50/16⌉
    gaps = torch.stack([start[0] - replies[name] for name in NAMES])
    expected = (start[0] - (shares @ steps) * ((shares / steps) @ gaps)).float()
    bias = result.weights["head.bias"]
    assert any(torch.allclose(window, bias, atol=1e-6) for window in expected.unfold(0, len(bias), 1))


# ---- evaluation


METRICS: list[tuple[dict[str, Any], str]] = [
    ({"round": 99.0}, "unknown key"),
    ({"client": 1.0}, "unknown key"),
    ({"clients": 1.0, "loss": 0.0}, "unknown key"),
    ({"=HYPERLINK(1)": 1.0}, "unknown key"),
    ({"macro_auc": 1e300}, "macro_auc is 1e+300, not from 0 to 100"),
    ({"map": -1.0}, "map is -1"),
    ({"map": float("inf")}, "map is inf"),
    ({"client_mean_auc": 50.0}, "unknown key"),
]


@pytest.mark.parametrize(("numbers", "reason"), METRICS, ids=[reason for _, reason in METRICS])
def test_only_valid_metrics_are_accepted(
    consortium: Consortium,  # noqa: F811
    tmp_path: Path,
    numbers: dict[str, float],
    reason: str,
) -> None:
    result, hear = attacked(consortium, tmp_path, EVALUATE, changed_reply(numbers=numbers), 1, partition__holdout=0.2)
    (refusal,) = [text for text in hear.said if "rejected" in text]
    assert refusal.startswith("round 1: the reply of site-b is rejected: ")
    assert reason in refusal
    (row,) = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert row["round"] == 1
    assert row["clients"] == 3
    assert 0 < row["sites_macro_auc"] <= 100
    assert row["sites_macro_auc"] != row["macro_auc"]  # the latter is of the server's own data
    lines = (tmp_path / "out" / "per_client.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in lines] == ["client", "site-a", "site-c"]
    assert result.metrics["sites_macro_auc"] == row["sites_macro_auc"]


def test_an_undefined_metric_is_accepted(consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
    result, hear = attacked(
        consortium, tmp_path, EVALUATE, changed_reply(numbers={"macro_auc": float("nan")}), 1, partition__holdout=0.2
    )
    assert not [text for text in hear.said if "rejected" in text]
    assert np.isfinite(result.metrics["sites_macro_auc"])


# ---- aggregation


def test_a_reply_whose_aggregation_fails_is_left_out_completely(
    consortium: Consortium,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone, _ = attacked(consortium, tmp_path / "rejected", TRAIN, changed_reply(numbers={"loss": None}))

    plain = WeightedAverageAggregator.add

    def half(self: WeightedAverageAggregator, peer: Any, reply: Message) -> None:
        plain(self, peer, reply)
        if peer.name == "site-b":
            raise RuntimeError("half of it is in the sums")

    monkeypatch.setattr(WeightedAverageAggregator, "add", half)
    result, hear = attacked(consortium, tmp_path / "half", TRAIN, lambda content: content)
    assert all(torch.equal(result.weights[name], tensor) for name, tensor in alone.weights.items())
    assert [row["clients"] for row in hear.rows] == [2, 2]
    (first, second) = [text for text in hear.said if "rejected" in text]
    assert first.startswith("round 1: the reply of site-b is rejected: it cannot be aggregated (RuntimeError")
    assert second.startswith("round 2: the reply of site-b is rejected: it cannot be aggregated (RuntimeError")


def test_an_invalid_aggregate_changes_nothing(
    consortium: Consortium,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next round then starts from a model that works, and no honest site is blamed."""
    plain = WeightedAverageAggregator.result

    def broken(self: WeightedAverageAggregator, merged: dict[str, torch.Tensor]) -> Any:
        new, records = plain(self, merged)
        if hear.rows:  # in round 2
            new["weights"][0] = torch.nan
        return new, records

    hear = RecordingCallback()
    one = drive(consortium, make_grid(consortium, tmp_path / "1"), tmp_path / "1" / "out", training__rounds=1)
    monkeypatch.setattr(WeightedAverageAggregator, "result", broken)
    result = drive(consortium, make_grid(consortium, tmp_path), tmp_path / "out", hear, training__rounds=2)
    assert all(torch.equal(result.weights[name], tensor) for name, tensor in one.weights.items())
    said = [text for text in hear.said if "changes nothing" in text]
    assert said == [
        "round 2 changes nothing: its replies do not result in a valid model (AggregationError: the "
        "aggregated weights hold NaN or infinite values, so that no round can follow from it.)"
    ]


def test_an_aggregated_model_has_no_negative_variance() -> None:
    flat = SimpleNamespace(variances=lambda length: [slice(length - 1, length)])
    merging = MethodAggregator.__new__(MethodAggregator)
    merging.method = SimpleNamespace(average_part=SimpleNamespace(weights=flat))  # type: ignore[assignment]
    merging._check({"weights": torch.tensor([-1.0, 0.0])})
    with pytest.raises(Exception, match="the aggregated model holds a negative variance"):
        merging._check({"weights": torch.tensor([1.0, -1e-6])})


# ---- who sent it, and when


def test_a_reply_counts_only_from_the_node_that_was_asked(consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
    grid, hear = make_grid(consortium, tmp_path), RecordingCallback()

    def tamper(node: FakeNode, sent: FlowerMessage, reply: FlowerMessage) -> FlowerMessage:
        if node.name == "site-b" and sent.metadata.message_type == TRAIN:
            reply.metadata.__dict__["_src_node_id"] = 3
        return reply

    grid.tamper = tamper
    drive(consortium, grid, tmp_path / "out", hear, training__rounds=1, min_clients=2)
    assert "round 1: the reply of site-b is rejected: another node sent it" in hear.said


def test_a_node_that_reconnected_must_introduce_itself_before_its_reply_counts(
    consortium: Consortium,  # noqa: F811
    tmp_path: Path,
) -> None:
    """It restarts while a message waits for it, takes it, and answers before it has said what data it has now."""
    grid, hear = make_grid(consortium, tmp_path), RecordingCallback()
    restarted: list[int] = []

    def tamper(node: FakeNode, sent: FlowerMessage, reply: FlowerMessage) -> FlowerMessage:
        if node.name == "site-b" and sent.metadata.message_type == TRAIN and not restarted:
            restarted.append(1)
            node.last_activated_at = "second"
        return reply

    grid.tamper = tamper
    drive(consortium, grid, tmp_path / "out", hear, training__rounds=1)
    assert [kind for kind, name in grid.log if name == "site-b"] == [HELLO, TRAIN, HELLO, TRAIN, MODEL, "query.bye"]
    assert hear.rows[0]["clients"] == 3


def test_a_silent_site_costs_one_deadline_per_round(consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
    grid, hear = make_grid(consortium, tmp_path), RecordingCallback()
    hear.at_round = {1: lambda: setattr(grid.nodes[1], "answers", False)}
    drive(
        consortium, grid, tmp_path / "out", hear, training__rounds=2, min_clients=2, round_timeout=1.0,
        partition__holdout=0.2,
    )  # fmt: skip
    assert [row["clients"] for row in hear.rows] == [3, 2]
    asked = [kind for kind, name in grid.log if name == "site-b"]
    assert asked.count(EVALUATE) == 1  # in round 1: in round 2 it is not waited for again
    assert [text for text in hear.said if "skipped" in text] == ["round 2: site-b is skipped (no reply in 1 s)"]


def test_a_rejected_site_is_distinguished_from_a_disconnected_one(consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
    grid, hear = make_grid(consortium, tmp_path), RecordingCallback()

    def tamper(node: FakeNode, sent: FlowerMessage, reply: FlowerMessage) -> FlowerMessage:
        if node.last_activated_at != "second" or sent.metadata.message_type != HELLO:
            return reply
        return FlowerMessage(changed_reply(info={"digest": "f" * 32})(reply.content), reply_to=sent)

    grid.tamper = tamper
    hear.at_round = {
        1: lambda: setattr(grid.nodes[1], "last_activated_at", "second"),
        2: lambda: setattr(grid.nodes[1], "status", "offline"),
    }
    drive(consortium, grid, tmp_path / "out", hear, training__rounds=3, min_clients=2, round_timeout=2)
    refused, gone = [text for text in hear.said if "skipped" in text]
    assert refused.startswith("round 2: site-b is skipped (it is rejected: its data changed since the run began")
    assert gone == "round 3: site-b is skipped (it is not connected)"


# ---- what leaves a site


def test_a_prototype_of_fewer_than_five_does_not_leave_a_site(
    consortium: Consortium,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker, "MIN_GROUP_SIZE", 7)
    grid, heard = make_grid(consortium, tmp_path), list[Message]()

    def listen(node: FakeNode, sent: FlowerMessage, reply: FlowerMessage) -> FlowerMessage:
        if node.name == "site-c" and sent.metadata.message_type == TRAIN:
            heard.append(from_records(reply.content)[0])
        return reply

    grid.tamper = listen
    drive(consortium, grid, tmp_path / "out", method__name="fedmlp", method__t1=1, training__rounds=2)
    rows = [line.split(",")[1:] for line in (consortium.folder / "site-c" / "labels.csv").read_text().splitlines()]
    place = [int(name.removeprefix("digit-")) for name in rows[0]]
    counts = torch.zeros(2, 10, dtype=torch.int64)
    for label in (0, 1):
        counts[label, place] = torch.tensor([sum(row[c] == str(label) for row in rows[1:]) for c in range(len(place))])
    assert ((counts[1] > 0) & (counts[1] < 7)).any()
    assert (counts[1] >= 7).any()
    for reply in heard:
        assert torch.equal(reply["tags/votes"], (counts >= 7) & ((counts == 0) | (counts >= 7)).all(0))  # both or none
        assert not reply["tags/prototypes"][~reply["tags/votes"]].any()
        assert not reply["counters"].any()  # how many batches it trained on is not said
