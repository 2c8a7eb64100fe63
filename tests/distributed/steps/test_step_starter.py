from dflow.distributed.steps.step_starter import first_of_a_life
from dflow.lowering.queues.channel import STEPS_OF_A_LIFE, StepId


def test_a_life_begins_beyond_all_steps_of_the_one_before() -> None:
    first, second = first_of_a_life(), first_of_a_life()
    assert second - first >= STEPS_OF_A_LIFE
    assert StepId("/job:ps/task:0", second + 7).place == 7
    assert second + STEPS_OF_A_LIFE < 1 << 63
