"""Parents of spans, when there is no span, and spans in log lines."""

from __future__ import annotations

import subprocess
import sys

# What an SDK holds stays for good: this runs in a separate process.
PROGRAM = """
from opentelemetry import context, trace
from runtime_core.telemetry import spans

def of_the_past(**more):
    return spans.ended_span("past", "INTERNAL", {}, began_ns=2, ended_ns=1, **more)

assert spans.current_ids() == ("", "")
assert of_the_past() is spans.NO_SPAN
with spans.span("nothing", "INTERNAL", {}, make=spans.Span) as nothing:
    assert not nothing.recording

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

kept = InMemorySpanExporter()
provider = TracerProvider(sampler=ALWAYS_ON)
provider.add_span_processor(SimpleSpanProcessor(kept))
trace.set_tracer_provider(provider)
UNKEPT = "00-%032x-%016x-00" % (1, 2)

def last():
    return kept.get_finished_spans()[-1]

def parent_of_new(**more):
    kept.clear()
    with spans.span("new", "INTERNAL", {}, make=spans.Span, **more):
        pass
    return "%016x" % last().parent.span_id

of_the_past(error="Fenced")
assert (last().status.status_code.name, last().attributes["error.type"]) == ("ERROR", "Fenced")
assert last().end_time == last().start_time
of_the_past()
assert (last().status.status_code.name, dict(last().attributes)) == ("UNSET", {})

assert spans.current_ids() == ("", "")
with spans.span("turn", "INTERNAL", {}, make=spans.Span) as turn:
    ids = spans.current_ids()
    assert tuple(turn.traceparent.split("-")[1:3]) == ids
    with spans.within(""):
        assert spans.current_ids() == ids, "nothing is named, nothing changes"
        assert parent_of_new() == ids[1]
    assert parent_of_new(parent=UNKEPT) == ids[1], "the one under way counts"
    kept.clear()
    with spans.span("alone", "INTERNAL", {}, parent=UNKEPT, inner=False, make=spans.Span) as alone:
        assert not alone.recording, "its parent counts alone, and is not kept"
    assert not kept.get_finished_spans()

    # A task of the run, which has no span of its own, and later has one.
    holder = spans.Parent()
    holder.span = turn
    token = context.attach(context.Context())
    with spans.under(holder):
        assert spans.current_ids() == ids, "of the turn that it belongs to"
        assert parent_of_new() == ids[1]
        with spans.span("call", "INTERNAL", {}, make=spans.Span) as call:
            assert spans.current_ids() != ids
            assert parent_of_new() == spans.current_ids()[1], "under the nearest"
    context.detach(token)

assert spans.task_traceparent("weft", "t-1", UNKEPT) == UNKEPT
trace.get_tracer_provider = object
assert spans.task_traceparent("weft", "t-1", "").endswith("-01"), "an SDK that we do not know decides for itself"
"""


def test_a_span_is_under_its_nearest_kept_ancestor() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


UNSAMPLED = """
import random
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased, ParentBasedTraceIdRatio, TraceIdRatioBased
from runtime_core.telemetry import spans, trace_context

class Even(TraceIdRatioBased):
    def should_sample(self, parent_context, trace_id, name, **more):
        return (ALWAYS_ON if trace_id % 2 == 0 else TraceIdRatioBased(0)).should_sample(parent_context, trace_id, name)

numbers = random.Random(1)
for sampler in (
    TraceIdRatioBased(0.3), ParentBased(TraceIdRatioBased(0.3)), ParentBasedTraceIdRatio(0.3), ParentBased(ALWAYS_ON),
    Even(0.3), ParentBased(Even(0.3)),
):
    provider = TracerProvider(sampler=sampler)
    trace.get_tracer_provider = lambda provider=provider: provider
    found = set()
    for _ in range(200):
        number = numbers.getrandbits(128)
        sampled = sampler.should_sample(None, number, "task t").decision.is_sampled()
        assert spans._sampler_of(provider)(number, "task t") == sampled, (sampler, number)
        found.add(sampled)
    assert found == ({True} if type(sampler) is ParentBased and sampler._root is ALWAYS_ON else {True, False}), sampler

kept = InMemorySpanExporter()
provider.add_span_processor(SimpleSpanProcessor(kept))
ids = trace_context.Ids(1, 2, 0)
with spans.within(trace_context.written(1, 2, 0)):
    expected = spans.current_traceparent(), spans.current_ids()
with spans.Unsampled(ids):
    assert (spans.current_traceparent(), spans.current_ids()) == expected
    assert not spans.keeps()
    with spans.span("new", "INTERNAL", {}, make=spans.Span) as made:
        assert not made.recording
    with provider.get_tracer("the code's own").start_as_current_span("own") as own:
        assert not own.is_recording()
        assert own.get_span_context().trace_id == 1
assert spans.current_ids() == ("", "")
assert not kept.get_finished_spans()
"""


def test_an_unsampled_task_is_recognised_before_any_span_is_made() -> None:
    done = subprocess.run([sys.executable, "-c", UNSAMPLED], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
