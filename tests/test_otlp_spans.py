"""What spans say, and how those of one request become one request."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.spans import T0, S, as_json, message, vllm_span

from hoptrace.collectors.engines.published.otlp_call import Call
from hoptrace.collectors.engines.published.otlp_calls import Calls
from hoptrace.collectors.engines.published.otlp_spans import Said, Stage, StartUp, meaning
from hoptrace.collectors.engines.published.otlp_wire import CLIENT, SERVER, Malformed, Span, spans_of_json, spans_of_protobuf

MS = 1_000_000


def span(number: int, attributes: dict[str, Any], *, parent: int | None = None, trace: str = "t", kind: int = 1, start: int = T0,
         length: int = S, name: str = "chat m", scope: str = "lib", **more: Any) -> Span:  # fmt: skip
    return Span(trace, f"s{number}", None if parent is None else f"s{parent}", name, kind, start, start + length, attributes,
                more.pop("resource", {}), scope, **more)  # fmt: skip


def chat(number: int, **more: Any) -> Span:
    attributes = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m"} | more.pop("attributes", {})
    return span(number, attributes, **{"kind": CLIENT} | more)


def engine(number: int, request_id: str, **more: Any) -> Span:
    attributes = vllm_span(number)["attributes"] | {"gen_ai.request.id": request_id} | more.pop("attributes", {})
    return span(number, attributes, **{"kind": SERVER, "name": "llm_request", "scope": "vllm.tracing.otel"} | more)


def requests(*spans: Span, server: str | None = "s", origin: str = "o") -> tuple[list[dict[str, Any]], Calls]:
    calls = Calls()
    for s in spans:
        calls.take(s, server, origin)
    calls.end()
    return [c.request() for c in calls.calls() if not c.gone], calls


# -- the wire ---------------------------------------------------------------------------------------------------------


def test_protobuf_and_json_read_alike() -> None:
    body = message(
        vllm_span(0, error="it broke", parent="00000000000000ff", kind=SERVER),
        vllm_span(1, attributes={"list": ["a", 2, 2.5, True], "big": 2**62}),
        resource={"service.name": "x", "process.pid": 7},
    )
    a, b = spans_of_protobuf(body), spans_of_json(as_json(body))
    assert a == b and len(a.spans) == 2 and not a.bad
    first = a.spans[0]
    assert (first.error, first.status, first.parent, first.scope) == (True, "it broke", "00000000000000ff", "vllm.tracing.otel")
    assert first.resource == {"service.name": "x", "process.pid": 7}
    assert a.spans[1].attributes["list"] == ["a", 2, 2.5, True] and a.spans[1].attributes["big"] == 2**62


def test_older_json_reads_too() -> None:
    (got,) = spans_of_json(
        {"resource_spans": [{"resource": {"attributes": [{"key": "service.name", "value": {"string_value": "x"}}]},
         "instrumentationLibrarySpans": [{"instrumentationLibrary": {"name": "l"}, "spans": [
             {"trace_id": "ab", "span_id": "cd", "name": "n", "kind": "SPAN_KIND_CLIENT", "start_time_unix_nano": 5,
              "end_time_unix_nano": "9", "status": {"code": "STATUS_CODE_ERROR"},
              "attributes": [{"key": "i", "value": {"int_value": 3}}]}]}]}]}
    ).spans  # fmt: skip
    assert (got.trace, got.id, got.kind, got.start_ns, got.end_ns, got.error, got.scope) == ("ab", "cd", CLIENT, 5, 9, True, "l")
    assert got.attributes == {"i": 3} and got.resource == {"service.name": "x"}


def test_spans_that_cannot_be_used_are_counted_apart() -> None:
    body = message(vllm_span(0), vllm_span(1, id=""), vllm_span(2, start=0))
    for found in (spans_of_protobuf(body), spans_of_json(as_json(body))):
        assert len(found.spans) == 1
        assert found.bad == {"span without an identifier": 1, "span without a start time": 1}


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(
        ["resourceSpans", "scopeSpans", "spans", "attributes", "key", "value", "intValue", "arrayValue", "values", "status",
         "code",
         "traceId", "spanId", "startTimeUnixNano", "kind", "events", "resource", "scope", "name"]), inner, max_size=6),
    max_leaves=40,
)  # fmt: skip


@given(_json, st.binary(max_size=80))
def test_reading_raises_nothing_but_malformed(data: Any, body: bytes) -> None:
    for read, what in ((spans_of_json, data), (spans_of_json, {"resourceSpans": [data]}), (spans_of_protobuf, body)):
        try:
            found = read(what)  # type: ignore[operator]
        except Malformed:
            continue
        for s in found.spans:
            meaning(s)


# -- meanings ---------------------------------------------------------------------------------------------------------


def test_vllm() -> None:
    said = meaning(engine(0, "cmpl-abc-0", start=T0))
    assert isinstance(said, Said)
    assert (said.view, said.id, said.start_ns, said.finish_ns) == ("engine", "cmpl-abc-0", T0, T0 + 400 * MS)
    assert (said.first_token_ns, said.engine_first_ns, said.scheduled_ns, said.queued_ns) == (
        T0 + 100 * MS, T0 + 100 * MS, T0 + 40 * MS, T0 + 20 * MS,
    )  # fmt: skip
    assert said.engine_end_ns == T0 + 390 * MS
    assert (said.prompt_tokens, said.output_tokens, said.max_tokens, said.sequences) == (50, 7, 7, 1)


def test_a_request_aborted_before_its_first_token_has_no_engine_times() -> None:
    """vLLM's stamps are then 0: the differences in its span are minus the machine's uptime."""
    said = meaning(engine(0, "c", attributes={"gen_ai.latency.time_to_first_token": 0.0,
                                              "gen_ai.latency.time_in_model_prefill": -86_400.5}))  # fmt: skip
    assert isinstance(said, Said)
    assert (said.first_token_ns, said.scheduled_ns, said.queued_ns, said.engine_end_ns) == (None, None, None, None)
    assert said.finish_ns == T0 + 400 * MS


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0, "0.1", True, 1e9])
def test_lengths_of_time_that_are_none(bad: Any) -> None:
    said = meaning(engine(0, "c", attributes={"gen_ai.latency.time_in_queue": bad}))
    assert isinstance(said, Said) and said.queued_ns is None and said.scheduled_ns is not None


def test_vllm_s_start_up_and_others() -> None:
    code = {"code.function": "f", "code.namespace": "vllm.x"}
    up = meaning(span(1, code, name="Load weights", scope="vllm.model_executor.model_loader.default_loader", length=2 * S,
                      resource={"vllm.process_name": "Worker_0"}))  # fmt: skip
    assert up == StartUp("Load weights (Worker_0)", T0, 2.0)
    assert meaning(span(1, {"http.method": "GET"}, name="GET /")) is None
    for operation in ("execute_tool", "invoke_agent", "embeddings", None):
        assert meaning(span(1, {"gen_ai.operation.name": operation})) is None


def test_clients_and_gateways_by_their_names_of_today_and_before() -> None:
    today = {
        "gen_ai.operation.name": "chat", "gen_ai.request.model": "m", "gen_ai.response.model": "m-1", "gen_ai.response.id": "r",
        "gen_ai.usage.input_tokens": 100, "gen_ai.usage.output_tokens": "20", "gen_ai.usage.cache_read.input_tokens": 64,
        "gen_ai.request.max_tokens": 30, "gen_ai.conversation.id": "c", "gen_ai.response.finish_reasons": ["stop", "stop"],
        "gen_ai.response.time_to_first_chunk": 0.25,
    }  # fmt: skip
    said = meaning(span(1, today, kind=CLIENT))
    assert said == Said("client", "r", T0, T0 + S, T0 + 250 * MS, prompt_tokens=100, output_tokens=20, cached_tokens=64,
                        max_tokens=30, model="m", session="c", finish_reason="stop")  # fmt: skip
    assert getattr(meaning(span(1, today, kind=SERVER)), "view", None) == "gateway"
    old = {
        "llm.request.type": "chat",
        "gen_ai.response.model": "m",
        "gen_ai.usage.prompt_tokens": 5,
        "llm.usage.completion_tokens": 6,
    }
    said = meaning(span(1, old, error=True, status="Connection reset"))
    assert isinstance(said, Said)
    assert (said.prompt_tokens, said.output_tokens, said.model, said.error) == (5, 6, "m", "Connection reset")


# -- requests of spans ------------------------------------------------------------------------------------------------


def test_one_span_one_request() -> None:
    (row,), calls = requests(engine(0, "cmpl-a-0"))
    assert row == {
        "received_ns": T0, "arrival_ns": T0, "arrival_of": "received", "first_token_ns": T0 + 100 * MS,
        "finish_ns": T0 + 400 * MS, "queued_ns": T0 + 20 * MS, "scheduled_ns": T0 + 40 * MS,
        "engine_first_token_ns": T0 + 100 * MS, "prompt_tokens": 50, "output_tokens": 7, "max_tokens": 7,
        "request_id": "cmpl-a",
    }  # fmt: skip
    (call,) = calls.calls()
    assert call.done and call.stages() == [
        {"server": "s", "engine_request_id": "cmpl-a-0", "sequence": 0, "enqueued_ns": T0 + 20 * MS, "scheduled_ns": T0 + 40 * MS,
         "end_ns": T0 + 390 * MS, "prompt_tokens": 50, "end_reason": "done"}
    ]  # fmt: skip


def test_the_same_span_again_counts_once() -> None:
    rows, calls = requests(engine(0, "a"), engine(0, "a"))
    assert len(rows) == 1 and rows[0]["output_tokens"] == 7
    assert calls.counts == {"span that had come before (sent again)": 1}


def test_sequences_of_one_prompt_are_one_request() -> None:
    two = {"gen_ai.request.n": 2}
    first = engine(0, "cmpl-a-0", attributes=two)
    second = engine(1, "cmpl-a-0", start=T0, attributes=two | {
        "gen_ai.latency.e2e": 0.7, "gen_ai.usage.completion_tokens": 9, "gen_ai.usage.prompt_tokens": 50})  # fmt: skip
    (row,), calls = requests(first)
    assert "output_tokens" not in row and "finish_ns" not in row, "half of it is not told yet: that is unknown, not 7"
    (row,), calls = requests(first, second)
    assert (row["prompt_tokens"], row["output_tokens"], row["finish_ns"]) == (50, 16, T0 + 700 * MS)
    # vLLM 0.32 says n = 1 in each span of the two: the same identifier and the same arrival tell.
    one = {"gen_ai.request.n": 1, "gen_ai.usage.prompt_tokens": 50}
    # … to some nanoseconds, by which the wall clock's way from the trace's is read differently for each span.
    (row,), calls = requests(engine(0, "cmpl-a-0", attributes=one), engine(1, "cmpl-a-0", attributes=one, start=T0 + 800))
    assert (row["prompt_tokens"], row["output_tokens"]) == (50, 14) and not calls.counts
    assert [s["sequence"] for s in calls.calls()[0].stages()] == [0, 1]


def test_prompts_of_one_batch_are_one_request() -> None:
    (row,), calls = requests(engine(0, "cmpl-a-0"), engine(1, "cmpl-a-1", attributes={"gen_ai.usage.prompt_tokens": 8}))
    assert (row["prompt_tokens"], row["output_tokens"]) == (58, 14)
    assert [s["sequence"] for s in calls.calls()[0].stages()] == [0, 1]


def test_an_identifier_used_twice_is_counted_not_mixed() -> None:
    (row,), calls = requests(engine(0, "chatcmpl-mine"), engine(1, "chatcmpl-mine", start=T0 + 9 * S))
    assert row["output_tokens"] == 7 and row["finish_ns"] == T0 + 400 * MS
    assert calls.counts == {"engine span whose request id was used before": 1}


_ORDERS = [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]


@pytest.mark.parametrize("order", _ORDERS)
@pytest.mark.parametrize("named", [True, False])
def test_client_gateway_and_engine_of_one_request_in_any_order(order: tuple[int, ...], named: bool) -> None:
    """By the server's identifier, or by standing above each other in one trace."""
    by = {"gen_ai.response.id": "chatcmpl-x"} if named else {}
    parents = (None, None, None) if named else (None, 1, 2)
    client = chat(1, start=T0 - 30 * MS, length=600 * MS, parent=parents[0],
                  attributes=by | {"gen_ai.usage.output_tokens": 99, "gen_ai.conversation.id": "c"})  # fmt: skip
    gateway = chat(2, start=T0 - 10 * MS, length=450 * MS, kind=SERVER, parent=parents[1], attributes=by)
    spans = [client, gateway, engine(3, "chatcmpl-x", parent=parents[2])]
    rows, _ = requests(*(spans[i] for i in order))
    assert len(rows) == 1
    row = rows[0]
    assert (row["sent_ns"], row["received_ns"], row["arrival_ns"], row["arrival_of"]) == (
        T0 - 30 * MS, T0 - 10 * MS, T0 - 30 * MS, "sent",
    )  # fmt: skip
    assert row["finish_ns"] == T0 + 570 * MS and "first_token_ns" not in row, "the client did not say when its first token came"
    assert row["engine_first_token_ns"] == T0 + 100 * MS
    assert (row["output_tokens"], row["session"], row["request_id"]) == (7, "c", "chatcmpl-x")


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_spans_between_them_do_not_matter(order: tuple[int, ...]) -> None:
    spans = [chat(1, start=T0 - MS), span(2, {}, parent=1, name="POST"), engine(3, "chatcmpl-x", parent=2)]
    rows, calls = requests(*(spans[i] for i in order))
    assert len(rows) == 1 and rows[0]["sent_ns"] == T0 - MS and rows[0]["output_tokens"] == 7
    assert calls.ignored == {"lib": 1}


def test_a_span_around_several_calls_is_none_itself() -> None:
    rows, calls = requests(chat(2, parent=1), chat(3, parent=1, start=T0 + S), chat(1, length=5 * S))
    assert len(rows) == 2
    assert calls.counts == {"span around several calls": 1}


def test_an_sdk_s_span_around_its_client_s_is_one_request() -> None:
    rows, _ = requests(chat(2, parent=1, start=T0 + MS), chat(1, length=5 * S))
    assert len(rows) == 1 and (rows[0]["sent_ns"], rows[0]["finish_ns"]) == (T0, T0 + 5 * S)


def test_prefill_and_decode_servers_of_one_request() -> None:
    """The answer is the decode server's; the prefill server made one token that nobody got."""
    calls = Calls()
    calls.take(engine(1, "chatcmpl-x", attributes={"gen_ai.usage.completion_tokens": 1}), "p", "o1")
    calls.take(engine(2, "chatcmpl-x", start=T0 + 300 * MS), "d", "o2")
    (call,) = calls.calls()
    row = call.request()
    assert (row["prompt_tokens"], row["output_tokens"], row["finish_ns"]) == (52, 7, T0 + 700 * MS)
    assert row["scheduled_ns"] == T0 + 40 * MS
    assert [s["server"] for s in call.stages()] == ["p", "d"]


def test_a_client_ahead_of_its_server_s_clock_is_left_signed() -> None:
    """B49: received before it was sent, says another host's clock. It stays so."""
    (row,), _ = requests(
        chat(1, start=T0 + 17_000, attributes={"gen_ai.response.id": "x"}), engine(2, "x", start=T0)
    )  # fmt: skip
    assert (row["sent_ns"], row["received_ns"], row["arrival_of"]) == (T0 + 17_000, T0, "received")


def test_without_outside_clients_are_left_out() -> None:
    calls = Calls()
    calls.take(chat(1), "s", "o", outside=False)
    calls.take(engine(2, "x", parent=1), "s", "o", outside=False)
    assert [c.link for c in calls.calls()] == ["x"]
    assert calls.counts == {"span of a client or gateway, whose requests are seen otherwise": 1}


def _sglang(role: str = "") -> list[Span]:
    """A request as SGLang 0.5 traces it: root, a span per thread, stages below it."""
    root = span(1, {"rid": "abcdef0123", "module": "sglang::request", "gen_ai.usage.prompt_tokens": 40,
                    "gen_ai.usage.completion_tokens": 5, "gen_ai.usage.cached_tokens": 16,
                    "gen_ai.latency.time_to_first_token": 0.2, "gen_ai.latency.e2e": 0.5},
                name=f"{role} Req abcdef01", scope="sglang server", length=501 * MS)  # fmt: skip
    thread = span(2, {"host_id": "h", "pid": 9, "thread_label": "Scheduler"}, parent=1, name="Scheduler [TP 0] (host:h | pid:9)",
                  scope="sglang server")  # fmt: skip
    at = {"request_process": (1, 2), "prefill_waiting": (2, 30), "prefill_forward": (30, 180), "decode_waiting": (180, 190),
          "decode_loop": (190, 200)}  # fmt: skip
    stages = [
        span(10 + i, {}, parent=2, name=name, scope="sglang server", start=T0 + a * MS, length=(b - a) * MS)
        for i, (name, (a, b)) in enumerate(at.items())
    ]
    return [root, thread, *stages]


@pytest.mark.parametrize("reverse", [False, True])
def test_sglang_s_stages_find_their_request(reverse: bool) -> None:
    """The root ends last, so its stages come first, from another process."""
    spans = _sglang()
    assert isinstance(meaning(spans[2]), Stage)
    (row,), calls = requests(*(spans[::-1] if reverse else spans))
    assert (row["queued_ns"], row["scheduled_ns"], row["engine_first_token_ns"]) == (T0 + 2 * MS, T0 + 30 * MS, T0 + 180 * MS)
    assert (row["first_token_ns"], row["finish_ns"]) == (T0 + 200 * MS, T0 + 500 * MS)
    assert (row["prompt_tokens"], row["output_tokens"], row["request_id"]) == (40, 5, "abcdef0123")
    (stage,) = calls.calls()[0].stages()
    assert (stage["enqueued_ns"], stage["scheduled_ns"], stage["cached_tokens"]) == (T0 + 2 * MS, T0 + 30 * MS, 16)
    assert not calls.counts and not calls.ignored.keys() - {"sglang server"}


def test_sglang_s_roles() -> None:
    spans = _sglang("decode")
    (row,), calls = requests(*spans[::-1])
    assert calls.calls()[0].stages()[0]["role"] == "decode"
    assert (row["queued_ns"], row["scheduled_ns"]) == (T0 + 180 * MS, T0 + 190 * MS)


def test_stages_without_a_request_are_counted() -> None:
    _, calls = requests(*_sglang()[1:])
    assert calls.counts == {"stage of no known request": 4}


def test_memory_is_bounded() -> None:
    calls = Calls(limit=10)
    forgotten: list[Call] = []
    for i in range(50):
        forgotten += calls.take(engine(i, f"chatcmpl-{i}", trace=str(i)), "s", "o").forgotten
    assert len(calls.calls()) == 10 and [c.link for c in forgotten] == [f"chatcmpl-{i}" for i in range(40)]


def test_an_engine_s_span_is_never_a_span_around_others() -> None:
    rows, calls = requests(engine(2, "a", parent=1), engine(3, "b", parent=1), engine(1, "c"))
    assert [r["request_id"] for r in rows] == ["a", "b", "c"] and not calls.counts


_ids = st.sampled_from([None, "a", "b", "cmpl-c-0", "cmpl-c-1"])
_tree = st.lists(
    st.tuples(st.sampled_from(["engine", "client", "gateway", "other", "stage"]), _ids, st.integers(0, 9), st.integers(0, 2)),
    min_size=1, max_size=14,
)  # fmt: skip


@given(_tree, st.randoms(use_true_random=False))
def test_any_spans_in_any_order_raise_nothing_and_no_output_is_counted_twice(tree: list[Any], rnd: Any) -> None:
    spans = []
    for i, (kind, name, parent, trace) in enumerate(tree):
        where: dict[str, Any] = {"parent": parent if parent < i else None, "trace": f"t{trace}"}
        if kind == "engine":
            spans.append(engine(i, name or "z", **where))
        elif kind == "stage":
            spans.append(span(i, {}, name="prefill_waiting", scope="sglang server", **where))
        elif kind == "other":
            spans.append(span(i, {}, **where))
        else:
            by = {"gen_ai.response.id": name} if name else {}
            spans.append(chat(i, kind=SERVER if kind == "gateway" else CLIENT, attributes=by, **where))
    rnd.shuffle(spans)
    rows, calls = requests(*spans)
    used = sum(1 for c in calls.calls() if not c.gone for s in c.stays if s.said is not None)
    assert used + calls.counts.get("engine span whose request id was used before", 0) == sum(k == "engine" for k, *_ in tree)
    assert sum(r.get("output_tokens", 0) for r in rows) <= 7 * used
    assert all("arrival_ns" in r for r in rows)
