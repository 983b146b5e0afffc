import datetime

from dstrial.doctor import clock
from dstrial.doctor.clock import Clock, Instant

NOW = datetime.datetime(2027, 3, 1, tzinfo=datetime.timezone.utc)


def status(**values):
    (found,) = clock.judge(Clock(**{"now": NOW, "stepped_s": 0.0, "is_synchronised": True, **values}))
    return found.status


def test_a_date_before_the_release_is_a_problem_and_a_step_a_note():
    assert status() == "ok"
    assert status(is_synchronised=False) == "ok"
    assert status(now=datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)) == "problem"
    assert status(stepped_s=-3600.0) == "note"


def test_a_step_is_the_difference_of_the_two_clocks():
    now = Instant.now()
    assert abs(clock.measure(now).stepped_s) < 0.5
    assert round(clock.measure(Instant(now.wall_s - 60, now.monotonic_s)).stepped_s) == 60
