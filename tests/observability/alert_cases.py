"""What each alert must do, as series with a sample a minute, in promtool's notation (`5x3`: 5, and three times more).

`_` is a scrape that failed, `stale` a series that is gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Case:
    """The expected state of an alert at some moments. `labels` are those of the firing alert; None: it is silent.

    With `slow`, a sample and an evaluation every quarter of an hour, for what takes days.
    """

    alert: str
    why: str
    series: Mapping[str, str]
    at: tuple[str, ...]
    labels: Mapping[str, str] | None = None
    description: str = ""
    slow: bool = False


def fires(
    alert: str,
    at: str,
    series: Mapping[str, str],
    labels: Mapping[str, str],
    description: str,
    why: str = "as it is meant",
    slow: bool = False,
) -> Case:
    """It fires at this moment, once, with these labels."""
    return Case(alert, why, series, tuple(at.split()), labels, description, slow)


def silent(alert: str, why: str, series: Mapping[str, str], at: str = "3m 6m 10m 20m", *, slow: bool = False) -> Case:
    """It fires at none of these moments."""
    return Case(alert, why, series, tuple(at.split()), slow=slow)


def on(name: str, partition: str = "0", instance: str = "a", stream: str = "agent") -> str:
    """A series that a partition's leader has measured on a stream."""
    group = {"agent": "agent-handler", "tool": "tool-handler", "ray": "ray-gateway", "record": "trajectory-recorder"}
    labels = f'partition="{partition}",stream="{stream}",group="{group[stream]}",instance="{instance}"'
    return f"weft_stream_{name}{{{labels}}}"


def of(name: str, instance: str = "a", **labels: str) -> str:
    """A series of one process."""
    shown = ",".join(f'{label}="{value}"' for label, value in {**labels, "instance": instance}.items())
    return f"weft_{name}{{{shown}}}"


AGENT = {"partition": "0", "stream": "agent", "group": "agent-handler"}
FIRST = {"partition": "0"}
MIB = 1024 * 1024


def ended(failed: str, completed: str) -> dict[str, str]:
    return {
        of("tasks_ended_total", agent="desk", status="failed"): failed,
        of("tasks_ended_total", agent="desk", status="completed"): completed,
        # What its user has cancelled is nobody's fault.
        of("tasks_ended_total", agent="desk", status="cancelled"): "0+100x500",
    }


def memory(used: str, limit: str) -> dict[str, str]:
    return {of("broker_memory_bytes", partition="0"): used, of("broker_memory_limit_bytes", partition="0"): limit}


def services(**values: str) -> dict[str, str]:
    every = {"agent_handler": "1x60", "tool_handler": "1x60", "state_manager": "1x60", "trajectory_recorder": "1x60"}
    return {
        of("build_info", service=service.replace("_", "-"), version="1"): shown
        for service, shown in {**every, **values}.items()
    }


WORK = (
    fires(
        "WeftGroupStuck", "5m", {on("lag_events"): "5x60", on("readers"): "0x60"}, AGENT,
        "5 events wait on the stream agent of partition 0, and no agent-handler reads it.",
    ),
    fires(
        "WeftGroupStuck", "7m 10m",
        {
            on("lag_events"): "5x5 stale", on("readers"): "0x5 stale",
            on("lag_events", instance="b"): "_x5 5x60", on("readers", instance="b"): "_x5 0x60",
        },
        AGENT, "5 events wait on the stream agent of partition 0, and no agent-handler reads it.",
        "and continues when another state-manager leads",
    ),
    silent("WeftGroupStuck", "there is a reader", {on("lag_events"): "5x60", on("readers"): "1x60"}),
    silent("WeftGroupStuck", "nothing waits", {on("lag_events"): "0x60", on("readers"): "0x60"}),
    silent("WeftGroupStuck", "readers are not known", {on("lag_events"): "5x60"}),
    silent("WeftGroupStuck", "readers are replaced", {on("lag_events"): "5x60", on("readers"): "1x5 0x1 1x60"}),
    silent(
        "WeftGroupStuck", "readers of another partition",
        {on("lag_events"): "5x60", on("readers"): "2x60", on("lag_events", "1"): "0x60", on("readers", "1"): "0x60"},
    ),
    fires(
        "WeftNothingRead", "10m", {on("oldest_waiting_seconds"): "0+60x60", on("readers"): "1x60"}, AGENT,
        "The oldest waiting event on the stream agent of partition 0 has aged by 5m 0s in five minutes, although "
        "agent-handler is running.",
    ),
    silent("WeftNothingRead", "it is only long", {on("oldest_waiting_seconds"): "600+30x60", on("readers"): "1x60"}),
    silent("WeftNothingRead", "nobody could read", {on("oldest_waiting_seconds"): "0+60x60", on("readers"): "0x60"}),
    silent("WeftNothingRead", "nothing waits", {on("oldest_waiting_seconds"): "0x60", on("readers"): "1x60"}),
    fires(
        "WeftWorkWaits", "12m", {on("oldest_waiting_seconds"): "400x60"}, AGENT,
        "The oldest event on the stream agent of partition 0 has waited for 6m 40s.",
    ),
    fires(
        "WeftWorkWaits", "12m", {on("oldest_waiting_seconds"): "400x6 _ _ 400x60"}, AGENT,
        "The oldest event on the stream agent of partition 0 has waited for 6m 40s.", "also where scrapes failed",
    ),
    silent("WeftWorkWaits", "it is read soon", {on("oldest_waiting_seconds"): "200x60"}),
    silent("WeftWorkWaits", "it was a moment", {on("oldest_waiting_seconds"): "400x3 0x60"}),
    fires(
        "WeftOldPending", "10m", {on("oldest_pending_seconds", stream="tool"): "1000x60"},
        {"partition": "0", "stream": "tool", "group": "tool-handler"},
        "tool-handler has held an event of the stream tool of partition 0 for 16m 40s.",
    ),
    silent("WeftOldPending", "steps of engines are long", {on("oldest_pending_seconds", stream="ray"): "9000x60"}),
    silent("WeftOldPending", "a turn may run so long", {on("oldest_pending_seconds"): "600x60"}),
    fires(
        "WeftStreamNearLimit", "5m", {on("lag_events"): "50000x60", on("pending_events"): "40000x60"}, AGENT,
        "90000 events are on the stream agent of partition 0 for agent-handler.",
    ),
    fires(
        "WeftStreamNearLimit", "5m", {on("lag_events", stream="record"): "170000x60"},
        {"partition": "0", "stream": "record", "group": "trajectory-recorder"},
        "170000 events are on the stream record of partition 0 for trajectory-recorder.", "for the record, too",
    ),
    silent(
        "WeftStreamNearLimit", "there is room",
        {
            on("lag_events"): "50000x60", on("pending_events"): "10000x60",
            on("lag_events", stream="record"): "90000x60", on("pending_events", stream="record"): "0x60",
        },
    ),
    fires(
        "WeftQueuesNearLimit", "5m",
        {
            of("tasks_queued", partition="0", tenant="acme"): "60000x60",
            of("tasks_queued", partition="0", tenant="*"): "30000x60",
        },
        FIRST, "90000 tasks wait for the turns of their tenants in partition 0.",
    ),
    silent("WeftQueuesNearLimit", "there is room", {of("tasks_queued", partition="0", tenant="acme"): "70000x60"}),
    fires(
        "WeftMailboxDeep", "8m", {of("mailbox_deepest_events", partition="0"): "6000x60"}, FIRST,
        "6000 events wait for one instance in partition 0.",
    ),
    silent("WeftMailboxDeep", "there is room", {of("mailbox_deepest_events", partition="0"): "4000x60"}),
    fires(
        "WeftTimersLate", "5m", {of("timers_late_seconds", partition="0"): "45x60"}, FIRST,
        "A timer of partition 0 is 45s late.",
    ),
    silent("WeftTimersLate", "they are soon made up for", {of("timers_late_seconds", partition="0"): "45x1 0x60"}),
    silent("WeftTimersLate", "none is due", {of("timers_late_seconds", partition="0"): "0x60"}),
    fires(
        "WeftProcessStalled", "3m", {of("stalled_seconds", service="agent-handler"): "40x60"},
        {"service": "agent-handler", "instance": "a"},
        "In agent-handler at a work has waited for 40s without progress.",
    ),
    silent("WeftProcessStalled", "it gets on", {of("stalled_seconds", service="agent-handler"): "20x60"}),
    silent(
        "WeftProcessStalled", "it went while Prometheus was away",
        {of("stalled_seconds", service="agent-handler"): "20x3 31 _x60"},
    ),
    silent("WeftProcessStalled", "it was restarted", {of("stalled_seconds", service="agent-handler"): "31 stale"}),
    fires(
        "WeftNoProgress", "20m",
        {
            of("tasks_open", partition="0"): "3x60", of("tasks_open", "b", partition="1"): "4x60",
            on("lag_events"): "5x60", on("pending_events"): "0x60", **ended("7x60", "9x60"),
            of("tasks_ended_total", agent="desk", status="cancelled"): "0x60",
        },
        {}, "7 tasks are open, handlers have work, and no task has ended in 15 minutes.",
    ),
    fires(
        "WeftNoProgress", "20m",
        {of("tasks_open", partition="0"): "3x60", on("lag_events"): "5x60", on("pending_events"): "0x60"},
        {}, "3 tasks are open, handlers have work, and no task has ended in 15 minutes.",
        "also where no task has ever ended",
    ),
    silent(
        "WeftNoProgress", "tasks wait for people",
        {of("tasks_open", partition="0"): "3x60", on("lag_events"): "0x60", on("pending_events"): "0x60"},
    ),
    silent(
        "WeftNoProgress", "tasks end",
        {
            of("tasks_open", partition="0"): "3x60", on("lag_events"): "5x60", on("pending_events"): "1x60",
            **ended("0x60", "0+1x60"),
        },
    ),
    silent(
        "WeftNoProgress", "an engine is busy for long",
        {
            of("tasks_open", partition="0"): "3x60",
            on("lag_events", stream="ray"): "5x60", on("pending_events", stream="ray"): "1x60",
        },
    ),
)  # fmt: skip

TASKS = (
    fires(
        "WeftErrorBudgetBurnsFast", "70m", ended("0+3x400", "0+7x400"), {},
        "30% of the tasks have failed; 1 % is the budget.",
    ),
    fires(
        "WeftErrorBudgetBurnsFast", "400m", ended("0+8x400", "0+92x400"), {},
        "8% of the tasks have failed; 1 % is the budget.", "also where it burns for hours",
    ),
    silent("WeftErrorBudgetBurnsFast", "a few fail", ended("0+1x400", "0+99x400"), "30m 70m 400m"),
    silent("WeftErrorBudgetBurnsFast", "it is over", ended("0+30x30 900x800", "0+70x800"), "60m 120m 300m"),
    silent("WeftErrorBudgetBurnsFast", "one of two is no alarm", ended("0 0 1x100", "0 1x100"), "3m 10m 60m"),
    silent("WeftErrorBudgetBurnsFast", "no task ends", ended("5x100", "9x100"), "3m 10m 60m"),
    silent(
        "WeftErrorBudgetBurnsFast", "counters start over",
        {
            of("tasks_ended_total", agent="desk", status="failed"): "90x30 0x60",
            of("tasks_ended_total", agent="desk", status="completed"): "900+10x30 0+10x60",
        },
        "31m 33m 40m 60m",
    ),
    fires(
        "WeftErrorBudgetBurnsSlowly", "3000m", ended("0+2x300", "0+98x300"), {},
        "2% of the tasks of three days have failed; 1 % is the budget.", slow=True,
    ),
    silent("WeftErrorBudgetBurnsSlowly", "that is the budget", ended("0+1x300", "0+199x300"), "150m 3000m", slow=True),
    fires(
        "WeftDeadLetters", "12m",
        {of("dead_letters_total", service="tool-handler", reason="poison"): "0x10 2x60"},
        {"service": "tool-handler", "reason": "poison"},
        "About 2 deliveries of tool-handler were given up in ten minutes, as poison.",
    ),
    silent("WeftDeadLetters", "none", {of("dead_letters_total", service="a", reason="poison"): "7x60"}),
    silent("WeftDeadLetters", "a process restarted", {of("dead_letters_total", service="a", reason="x"): "7x9 0x60"}),
    silent(
        "WeftDeadLetters", "a process came",
        {
            of("dead_letters_total", service="a", reason="x"): "7x9 stale",
            of("dead_letters_total", "b", service="a", reason="x"): "_x9 0x60",
        },
    ),
    silent(
        "WeftDeadLetters", "a command was refused",
        {of("dead_letters_total", service="state-manager", reason="rejected"): "0+5x60"},
    ),
    fires(
        "WeftDeadLettersGrow", "40m", {of("dead_letters_total", service="a", reason="poison"): "0+5x60"}, {},
        "About 150 deliveries were given up in half an hour, and it continues.",
    ),
    silent("WeftDeadLettersGrow", "some", {of("dead_letters_total", service="a", reason="poison"): "0+1x60"}),
    silent(
        "WeftDeadLettersGrow", "it is over",
        {of("dead_letters_total", service="a", reason="x"): "0+9x3 200x60"}, "20m 25m",
    ),
    fires(
        "WeftDeadLettersTrimmed", "12m",
        {
            of("dead_letters_trimmed_total", partition="0", stream="tasks:shop", cause="bytes"): "0x10 2x60",
            of("dead_letters_trimmed_total", "b", partition="0", stream="tasks:shop", cause="bytes"): "0x10 2x60",
            of("dead_letters_trimmed_total", partition="1", stream="tasks:shop", cause="bytes"): "0x10 2x60",
            of("dead_letters_trimmed_total", partition="0", stream="agent", cause="bytes"): "5x60",
        },
        {"stream": "tasks:shop", "cause": "bytes"},
        "About 4 dead letters of tasks:shop were trimmed in ten minutes, by bytes.",
    ),
    silent(
        "WeftDeadLettersTrimmed", "none",
        {of("dead_letters_trimmed_total", partition="0", stream="agent", cause="age"): "7x60"},
    ),
    fires(
        "WeftSubmitsOverloaded", "14m", {of("tasks_refused_total", partition="0", reason="overloaded"): "0x10 4x60"},
        FIRST, "About 4 commands were refused in ten minutes for partition 0.",
    ),
    silent("WeftSubmitsOverloaded", "none", {of("tasks_refused_total", partition="0", reason="overloaded"): "9x60"}),
    silent("WeftSubmitsOverloaded", "others", {of("tasks_refused_total", partition="0", reason="invalid"): "0+9x60"}),
    fires(
        "WeftSubmitsRefused", "40m", {of("tasks_refused_total", partition="0", reason="invalid"): "0+1x60"},
        {"partition": "0", "reason": "invalid"}, "About 30 commands were refused in half an hour as invalid.",
    ),
    silent("WeftSubmitsRefused", "a few", {of("tasks_refused_total", partition="0", reason="invalid"): "0x9 3x60"}),
)  # fmt: skip

BROKER = (
    fires(
        "WeftBrokerAway", "3m",
        {
            of("broker_connected", service="tool-handler"): "0x60",
            of("broker_connected", "b", service="tool-handler"): "0x60",
        },
        {"service": "tool-handler"}, "2 processes of tool-handler get no answer from the broker.",
    ),
    silent("WeftBrokerAway", "it is there", {of("broker_connected", service="tool-handler"): "1x60"}),
    silent(
        "WeftBrokerAway", "it went while Prometheus was away",
        {of("broker_connected", service="tool-handler"): "1x3 0 _x60"},
    ),
    silent("WeftBrokerAway", "it was restarted", {of("broker_connected", service="tool-handler"): "1x5 0 1x60"}),
    fires(
        "WeftBrokerMemoryHigh", "8m", memory(f"{85 * MIB}x60", f"{100 * MIB}x60"), FIRST,
        "The broker of partition 0 uses 85% of its maxmemory.",
    ),
    silent("WeftBrokerMemoryHigh", "there is room", memory(f"{70 * MIB}x60", f"{100 * MIB}x60")),
    silent("WeftBrokerMemoryHigh", "no limit is set", memory(f"{70 * MIB}x60", "0x60")),
    silent("WeftBrokerMemoryHigh", "the user may not ask for it", {}),
    fires(
        "WeftBrokerMemoryFull", "3m", memory(f"{96 * MIB}x60", f"{100 * MIB}x60"), FIRST,
        "The broker of partition 0 uses 96% of its maxmemory.",
    ),
    silent("WeftBrokerMemoryFull", "there is room", memory(f"{90 * MIB}x60", f"{100 * MIB}x60")),
    silent("WeftBrokerMemoryFull", "no limit is set", memory(f"{90 * MIB}x60", "0x60")),
    fires(
        "WeftBrokerNotDurable", "3m", {of("broker_append_only_ok", partition="0"): "1 0x60"}, FIRST,
        "The append-only file of the broker of partition 0 is off, or its last write failed.",
    ),
    silent("WeftBrokerNotDurable", "all is well", {of("broker_append_only_ok", partition="0"): "1x60"}),
    silent("WeftBrokerNotDurable", "the user may not ask for it", {}),
    fires(
        "WeftBrokerEvicts", "3m", {of("broker_evicted_keys", partition="0"): "7x60"}, FIRST,
        "The broker of partition 0 has evicted 7 keys since its start.",
    ),
    silent("WeftBrokerEvicts", "none", {of("broker_evicted_keys", partition="0"): "0x60"}),
    fires(
        "WeftBrokerSlow", "12m", {of("broker_ping_seconds", partition="0"): "0.25x60"}, FIRST,
        "A round trip to the broker of partition 0 takes 250ms.",
    ),
    silent("WeftBrokerSlow", "it is quick", {of("broker_ping_seconds", partition="0"): "0.001x60"}),
    silent("WeftBrokerSlow", "it was slow once", {of("broker_ping_seconds", partition="0"): "0.001x5 0.4 0.001x60"}),
)  # fmt: skip

SERVICES = (
    fires(
        "WeftServiceAbsent", "10m", services(tool_handler="1x3 stale"), {"service": "tool-handler"},
        "Prometheus has scraped no tool-handler for three minutes.",
    ),
    silent("WeftServiceAbsent", "all are there", services()),
    silent("WeftServiceAbsent", "it was updated", services(tool_handler="1x3 stale _ 1x60")),
    fires(
        "WeftServiceDown", "5m", {'up{job="weft",instance="a"}': "1x1 0x60"}, {"job": "weft", "instance": "a"},
        "a has not answered Prometheus for two minutes.",
    ),
    silent("WeftServiceDown", "a scrape failed", {'up{job="weft",instance="a"}': "1x3 0 1x60"}),
    silent("WeftServiceDown", "a pod is gone", {'up{job="weft",instance="a"}': "1x3 0 stale"}),
    silent("WeftServiceDown", "it went while Prometheus was away", {'up{job="weft",instance="a"}': "1x3 0 _x60"}),
    silent("WeftServiceDown", "another's", {'up{job="prometheus",instance="a"}': "0x60"}),
    fires(
        "WeftServiceRestarts", "20m",
        {'process_start_time_seconds{job="weft",instance="a"}': "100x2 200x2 300x2 400x2 500x60"},
        {"instance": "a"}, "The process at a was started 4 times in half an hour.",
    ),
    silent("WeftServiceRestarts", "it runs", {'process_start_time_seconds{job="weft",instance="a"}': "100x60"}),
    silent(
        "WeftServiceRestarts", "an update",
        {
            'process_start_time_seconds{job="weft",instance="a"}': "100x5 stale",
            'process_start_time_seconds{job="weft",instance="b"}': "_x5 400x60",
        },
    ),
    fires(
        "WeftNoLeader", "3m",
        {
            of("leader", service="state-manager", partition="0"): "0x60",
            of("leader", "b", service="state-manager", partition="0"): "0x60",
        },
        {"service": "state-manager", "partition": "0"}, "No state-manager leads partition 0.",
    ),
    fires(
        "WeftNoLeader", "8m",
        {
            of("leader", service="state-manager", partition="0"): "1x5 _x60",
            of("leader", "b", service="state-manager", partition="0"): "0x60",
        },
        {"service": "state-manager", "partition": "0"}, "No state-manager leads partition 0.",
        "the leader went while Prometheus was away",
    ),
    silent(
        "WeftNoLeader", "the lead moves",
        {
            of("leader", service="state-manager", partition="0"): "1x5 stale",
            of("leader", "b", service="state-manager", partition="0"): "0x6 1x60",
        },
    ),
    fires(
        "WeftTwoLeaders", "4m",
        {
            of("leader", service="state-manager", partition="0"): "1x60",
            of("leader", "b", service="state-manager", partition="0"): "1x60",
        },
        {"service": "state-manager", "partition": "0"}, "2 processes of state-manager lead partition 0.",
    ),
    silent(
        "WeftTwoLeaders", "the leader went while Prometheus was away",
        {
            of("leader", service="state-manager", partition="0"): "1x5 _x60",
            of("leader", "b", service="state-manager", partition="0"): "0x5 1x60",
        },
        "7m 8m 9m",
    ),
    silent(
        "WeftTwoLeaders", "each leads one partition",
        {
            of("leader", service="state-manager", partition="0"): "1x60",
            of("leader", service="state-manager", partition="1"): "0x60",
            of("leader", "b", service="state-manager", partition="1"): "1x60",
        },
    ),
    fires(
        "WeftHeartbeatOld", "6m", {of("heartbeat_age_seconds", service="agent-handler"): "0.5 2.5 0.5 2.5x60"},
        {"service": "agent-handler", "instance": "a"}, "The heartbeat of agent-handler at a was 2.5s old.",
    ),
    silent("WeftHeartbeatOld", "all is well", {of("heartbeat_age_seconds", service="agent-handler"): "1x60"}),
    fires(
        "WeftDeclaredDead", "12m", {of("fenced_commits_total", service="agent-handler"): "0x9 1x60"},
        {"service": "agent-handler", "instance": "a"}, "About 1 commits of agent-handler at a were refused.",
    ),
    silent("WeftDeclaredDead", "none", {of("fenced_commits_total", service="agent-handler"): "4x60"}),
    silent("WeftDeclaredDead", "it started over", {of("fenced_commits_total", service="agent-handler"): "4x9 0x60"}),
    fires(
        "WeftEventLoopBlocked", "12m", {of("loop_lag_seconds", service="agent-handler"): "0.5x60"},
        {"service": "agent-handler", "instance": "a"}, "The event loop of agent-handler at a wakes 500ms late.",
    ),
    silent("WeftEventLoopBlocked", "once", {of("loop_lag_seconds", service="agent-handler"): "0x5 1 0x60"}),
    fires(
        "WeftDefect", "12m", {of("events_handled_total", service="agent-handler", outcome="defect"): "0x9 1x60"},
        {"service": "agent-handler"}, "About 1 deliveries of agent-handler met an unexpected error.",
    ),
    silent("WeftDefect", "none", {of("events_handled_total", service="a", outcome="handled"): "0+9x60"}),
    fires(
        "WeftHooksFail", "12m", {of("hook_failures_total", service="agent-handler", point="before_agent"): "0x9 1x60"},
        {"point": "before_agent"}, "About 1 executions of hooks at before_agent have failed.",
    ),
    fires(
        "WeftHooksFail", "12m", {of("hook_failures_total", service="agent-handler", point="before_agent"): "_x9 2x60"},
        {"point": "before_agent"}, "About 2 executions of hooks at before_agent have failed.",
        "also the first time that a process shows any",
    ),
    silent(
        "WeftHooksFail", "long ago",
        {of("hook_failures_total", service="agent-handler", point="before_agent"): "3x60"}, "20m 40m",
    ),
    fires(
        "WeftMeasuresMissing", "10m", {of("measured_timestamp_seconds", partition="0"): "0+60x4 240x60"}, FIRST,
        "Waiting work has not been measured for more than a minute.",
    ),
    fires(
        "WeftMeasuresMissing", "10m", {of("measured_timestamp_seconds", partition="0"): "0+60x3 stale"}, {},
        "Waiting work has not been measured for more than a minute.", "also where nobody ever does",
    ),
    silent("WeftMeasuresMissing", "all is well", {of("measured_timestamp_seconds", partition="0"): "0+60x60"}),
    silent(
        "WeftMeasuresMissing", "the lead moves",
        {
            of("measured_timestamp_seconds", partition="0"): "0+60x5 stale",
            of("measured_timestamp_seconds", "b", partition="0"): "_x6 420+60x60",
        },
    ),
)  # fmt: skip

DEPENDENCIES = (
    fires(
        "WeftEngineDisconnected", "6m",
        {of("engine_connected", engine="ray"): "0x60", of("engine_connected", "b", engine="ray"): "0x60"},
        {"engine": "ray"}, "No ray-gateway is connected; its steps wait, and then fail.",
    ),
    silent(
        "WeftEngineDisconnected", "one of two is connected",
        {of("engine_connected", engine="ray"): "0x60", of("engine_connected", "b", engine="ray"): "1x60"},
    ),
    silent("WeftEngineDisconnected", "there is no gateway", {}),
    silent("WeftEngineDisconnected", "the engine restarts", {of("engine_connected", engine="ray"): "1x5 0x1 1x60"}),
    fires(
        "WeftEngineStepsLost", "20m", {of("engine_steps_total", engine="ray", end="lost"): "0+1x60"},
        {"engine": "ray"}, "About 15 steps on ray were lost or found no engine.",
    ),
    silent("WeftEngineStepsLost", "one", {of("engine_steps_total", engine="ray", end="lost"): "0x9 1x60"}),
    silent("WeftEngineStepsLost", "they complete", {of("engine_steps_total", engine="ray", end="completed"): "0+9x60"}),
    fires(
        "WeftMcpServerDown", "6m", {of("mcp_server_up", server="desk"): "0x60"}, {"server": "desk"},
        "No tool-handler is connected to the MCP server desk.",
    ),
    silent("WeftMcpServerDown", "it restarts", {of("mcp_server_up", server="desk"): "1x5 0x1 1x60"}),
    silent(
        "WeftMcpServerDown", "one of two is connected",
        {of("mcp_server_up", server="desk"): "0x60", of("mcp_server_up", "b", server="desk"): "1x60"},
    ),
    fires(
        "WeftModelCallsFail", "15m",
        {
            of("model_calls_total", provider="openai", model="m", outcome="answered"): "0+5x60",
            of("model_calls_total", provider="openai", model="m", outcome="RateLimited"): "0+5x60",
        },
        {"provider": "openai", "model": "m"}, "50% of the calls of m (openai) are not answered.",
    ),
    silent(
        "WeftModelCallsFail", "a few",
        {
            of("model_calls_total", provider="openai", model="m", outcome="answered"): "0+95x60",
            of("model_calls_total", provider="openai", model="m", outcome="RateLimited"): "0+5x60",
        },
    ),
    silent(
        "WeftModelCallsFail", "one of one",
        {of("model_calls_total", provider="openai", model="m", outcome="RateLimited"): "0x9 1x60"},
    ),
)  # fmt: skip

CASES = (*WORK, *TASKS, *BROKER, *SERVICES, *DEPENDENCIES)
