"""The timeline of a lowered graph, by hand: a launch takes 10 us, a copy 20 us and 0.1 ns for each byte."""

from __future__ import annotations

from dflow.lowering.placement.timeline import timeline
from dflow.tracing.syntax.text import parse

HERE, CPU_0, CPU_1 = "/job:worker/task:0", "/job:worker/task:0/device:cpu:0", "/job:worker/task:0/device:cpu:1"
CALL, COPY = 10_000, 20_000


def test_calls_of_a_device_follow_one_another_and_copies_go_at_once() -> None:
    one = timeline(
        parse(f"""
graph(%x: f32[2] @{CPU_0}) {{
  %a: f32[2] = xla.call(%x) {{donate=()}} {{
    graph(%x: f32[2]) {{
      return %x
    }}
  }}  @{CPU_0}
  %b: f32[2] = xla.call(%x) {{donate=()}} {{
    graph(%x: f32[2]) {{
      return %x
    }}
  }}  @{CPU_0}
  %a.cpu1: f32[2] = dev.copy(%a) {{source="{CPU_0}"}}  @{CPU_1}
  %b.cpu1: f32[2] = dev.copy(%b) {{source="{CPU_0}"}}  @{CPU_1}
  return %b.cpu1
}}""")
    )
    assert one.start == [0, CALL, CALL, 2 * CALL]
    assert one.end == [CALL, 2 * CALL, CALL + COPY, 2 * CALL + COPY]
    assert max(one.end) == 2 * CALL + COPY
    # The first device has the argument and two results; the second two copies, the unused one until it has arrived.
    assert one.peak_bytes == {CPU_0: 24, CPU_1: 16}


def test_a_receive_takes_memory_from_when_its_value_is_sent() -> None:
    sent = timeline(
        parse(f"""
graph(%x: f32[8]) {{
 !%sent: token = net.send(%x) {{destination="/job:ps/task:0", edge="x"}}  @{HERE}
 !%x.received: f32[8] = net.recv() {{edge="x", source="{HERE}", type=f32[8]}}  @/job:ps/task:0
  return
}}""")
    )
    assert (sent.start, sent.end) == ([0, 0], [COPY + 3, COPY + 3])
    assert sent.peak_bytes == {"/job:ps/task:0": 32}


def test_a_snapshot_takes_memory_only_once_its_variable_is_written() -> None:
    program = """
graph(%w: ref<f32[1000]> @CPU_0, %x: f32[1000] @CPU_0) {
 !%w_1: f32[1000] = xla.call(%w) {donate=()} {
    graph(%w: ref<f32[1000]>) {
     !%w_1: f32[1000] = var.read(%w)
      return %w_1
    }
  }  @CPU_0
  %copy: f32[1000] = dev.copy(%w_1) {source="CPU_0"}  @CPU_1WRITE
  return
}"""
    write = """
 !%done: token = xla.call(%w, %x) {donate=(0,)} {
    graph(%w: ref<f32[1000]>, %x: f32[1000]) {
     !%1: token = var.assign(%w, %x)
      return
    }
  }  @CPU_0  after(%w_1)"""
    program = program.replace("CPU_0", CPU_0).replace("CPU_1", CPU_1)
    assert timeline(parse(program.replace("WRITE", ""))).peak_bytes == {CPU_0: 8000, CPU_1: 4000}
    # The copy has not ended when the variable is written, so the old value stays beside the new one.
    written = program.replace("WRITE", write.replace("CPU_0", CPU_0))
    assert timeline(parse(written)).peak_bytes == {CPU_0: 12000, CPU_1: 4000}
