"""Tools and environments in processes of their own."""

import time
from pathlib import Path

import psutil
import pytest

from rlhf_pipeline.episodes.processes import CallError, Server
from rlhf_pipeline.errors import StageError

TOOLS = str(Path(__file__).with_name("own_tools.py"))


def server(*names, environment=None, arguments=None, timeout_s=20.0):
    code = {f"tools.{index}": f"{TOOLS}:{name}" for index, name in enumerate(names)}
    code |= {} if environment is None else {"environment": f"{TOOLS}:{environment}"}
    return Server("grpo", code, arguments or {}, timeout_s)


@pytest.fixture(scope="module")
def hostile():
    return server("add", "hang", "leave", "fork", "gigabyte", "draw", timeout_s=1.0)


def test_a_schema_is_that_of_transformers(hostile):
    add = hostile.schemas()[0]["function"]
    assert add["name"] == "add" and add["description"] == "Add two numbers."
    assert add["parameters"]["properties"]["a"] == {
        "type": "integer",
        "description": "The first number.",
    }


def test_a_function_without_type_hints_is_refused_by_its_place():
    with pytest.raises(StageError, match=r"grpo\.tools\.1: .*expected type hints.*Fix: add them"):
        server("add", "untyped").schemas()


def test_a_function_that_is_not_there_is_refused():
    with pytest.raises(StageError, match=r"grpo\.tools\.0: found functions .*expected minus"):
        server("minus").schemas()


def test_calls_return_texts_and_exceptions_are_errors(hostile):
    episode = hostile.episode((1,))
    assert episode.ask("call", "add", {"a": 1, "b": 2}) == "3"
    with pytest.raises(CallError, match=r"TypeError: .*unexpected keyword argument 'c'") as found:
        episode.ask("call", "add", {"a": 1, "c": 2})
    assert not found.value.lost
    assert episode.ask("call", "add", {"a": 1, "b": 3}) == "4"
    episode.close()


@pytest.mark.parametrize(
    "name, arguments, reason",
    [
        ("hang", {"seconds": 60}, "took longer than 1 s"),
        ("leave", {"code": 3}, "ended its process"),
    ],
)
def test_what_hangs_or_ends_is_one_episode_alone(hostile, name, arguments, reason):
    bad, good = hostile.episode((1,)), hostile.episode((2,))
    begun = time.monotonic()
    with pytest.raises(CallError, match=reason) as found:
        bad.ask("call", name, arguments)
    assert found.value.lost and time.monotonic() - begun < 10
    assert good.ask("call", "add", {"a": 1, "b": 2}) == "3"
    bad.close(), good.close()


def test_the_end_of_an_episode_ends_what_it_has_started(hostile):
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    episode = hostile.episode((1,))
    with pytest.raises(CallError):
        episode.ask("call", "hang", {"seconds": 3600})
    started = [c for c in psutil.Process().children(recursive=True) if c.pid not in before]
    assert len(started) == 2
    episode.close()
    assert psutil.wait_procs(started, timeout=10)[1] == []


def test_a_fork_that_a_call_leaves_behind_does_not_answer(hostile):
    episode = hostile.episode((1,))
    assert [episode.ask("call", "fork", {"number": n}) for n in range(3)] == ["0", "1", "2"]
    assert episode.ask("call", "add", {"a": 1, "b": 2}) == "3"
    episode.close()


def test_a_process_of_a_tool_obeys_the_tool():
    assert server("run").episode((1,)).ask("call", "run", {"seconds": 60}) == "ended"


def test_a_gigabyte_of_text_is_cut_in_its_process(hostile):
    patient = server("gigabyte")
    episode = patient.episode((1,))
    assert episode.ask("call", "gigabyte", {"letter": "a"}) == "a" * 100_000
    episode.close()


def test_the_seed_of_an_episode_is_the_randomness_of_its_tools(hostile):
    def drawn(seed):
        episode = hostile.episode(seed)
        found = [episode.ask("call", "draw", {"most": 10**9}) for _ in range(3)]
        episode.close()
        return found

    assert drawn((1, 2, 3)) == drawn((1, 2, 3)) != drawn((1, 2, 4))


def test_functions_of_one_file_share_its_state_within_an_episode():
    own = server("write", "read")
    one, two = own.episode((1,)), own.episode((2,))
    assert one.ask("call", "write", {"note": "a"}) == "1"
    assert one.ask("call", "read", {"number": 0}) == "a"
    assert two.ask("call", "write", {"note": "b"}) == "1"


def test_a_server_that_has_ended_is_named():
    own = server("add")
    own.episode((1,)).ask("call", "add", {"a": 1, "b": 2})
    own._process.kill()
    own._process.wait()
    with pytest.raises(StageError, match=r"expected a process for an episode. Fix: see the log"):
        own.episode((2,))


def test_a_fault_of_the_import_is_said_each_time_at_once():
    own = server("minus")
    for _ in range(3):
        begun = time.monotonic()
        with pytest.raises(StageError, match="expected minus"):
            own.schemas()
    assert time.monotonic() - begun < 1


def test_an_environment_has_an_instance_for_each_episode():
    environment = server(environment="Countdown", arguments={"turns": 2})
    one, two = environment.episode((1,)), environment.episode((2,))
    for episode in one, two:
        assert episode.ask("reset", {"reference": "x"}) == [
            {"role": "user", "content": "count 2, x"}
        ]
    assert one.ask("step", "a") == [[{"role": "user", "content": "1 left"}], 0.5, False]
    assert one.ask("step", "a")[2] is True
    assert two.ask("step", "a")[2] is False
    one.close(), two.close()


def test_the_processes_end_with_the_server():
    own = server("add")
    own.episode((1,)).ask("call", "add", {"a": 1, "b": 2})
    leader = psutil.Process(own._process.pid)
    processes = [*leader.children(), leader]
    own.stop()
    assert psutil.wait_procs(processes, timeout=10)[1] == []
