import hashlib
import textwrap

import pytest
from helpers.recipes import written
from helpers.scoring import loaded

from rlgen.errors import DataError, RewardError
from rlgen.rewards.builtin import exact_match, regex_match


@pytest.fixture
def write(tmp_path):
    return lambda source, name="rewards.py": written(tmp_path, textwrap.dedent(source), name)


def test_a_built_in_and_a_function_of_a_module():
    reward, one = loaded("exact_match", {"answer"}, weight=0.5)
    assert (reward.label, reward.entry.weight, one.function) == ("exact_match", 0.5, exact_match)
    assert not reward.of_group and not one.facts.is_async
    assert loaded("rlgen.rewards.builtin:regex_match", args={"pattern": "a"})[1].function is regex_match


def test_a_function_of_a_file_keeps_the_hash_of_the_file(write):
    path = write("def brevity(completion, limit=3):\n    return -len(completion) / limit\n")
    reward, one = loaded(f"{path}:brevity", args={"limit": 2}, name="short")
    assert reward.label == "short" and reward.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert one.function(**reward.arguments({"completion": "abcd", "step": 3})) == -2.0


def test_a_function_of_a_module_keeps_the_hash_of_the_file_behind_it(write, tmp_path, monkeypatch, opened):
    package = write("", name="judges/__init__.py")
    monkeypatch.syspath_prepend(tmp_path)  # workers find what the trainer finds

    def hashed(source):
        files = write(source, name="judges/short.py"), package
        (reward,) = opened([{"use": "judges.short:f"}], set()).rewards  # imported by a new worker
        hashes = "".join(hashlib.sha256(path.read_bytes()).hexdigest() for path in files)
        assert reward.sha256 == hashlib.sha256(hashes.encode()).hexdigest()
        return reward.sha256

    assert hashed("def f(completion): return 0.25\n") != hashed("def f(completion): return 0.5\n")


def test_the_hash_of_a_reward_covers_the_modules_beside_it(write, tmp_path, monkeypatch, opened):
    write("", name="parts/__init__.py")
    write("import digits_helper, parts.inner\ndef f(completion): return digits_helper.VALUE\n")
    other = write("def g(completion): return 1.0\n", name="other.py")  # another reward of the folder
    monkeypatch.syspath_prepend(tmp_path)  # as PYTHONPATH does

    def hashed(value, inner, beside):
        write(f"VALUE = {value}\n", name="digits_helper.py")
        write(f"VALUE = {inner}\n", name="parts/inner.py")
        write(f"VALUE = {beside}\n", name="never_imported.py")
        first, second = opened([{"use": f"{other}:g"}, {"use": f"{tmp_path}/rewards.py:f"}], set()).rewards
        assert first.sha256 == hashlib.sha256(other.read_bytes()).hexdigest()
        return second.sha256

    before = hashed(0.25, 1, 1)
    assert before == hashed(0.25, 1, 2) and len({before, hashed(0.75, 1, 1), hashed(0.25, 2, 1)}) == 3


def test_a_file_may_define_dataclasses(write):
    path = write("""
        from __future__ import annotations
        from dataclasses import dataclass

        @dataclass
        class Point:
            x: float

        def f(completion):
            return Point(2.0).x
        """)
    assert loaded(f"{path}:f")[1].function(completion="") == 2.0


@pytest.mark.parametrize(
    ("signature", "of_group", "is_async"),
    [
        ("def f(completion)", False, False),
        ("def f(completions)", True, False),
        ("def f(prompts, **kwargs)", True, False),
        ("async def f(completion)", False, True),
        ("async def f(completions)", True, True),
    ],
)
def test_the_signature_decides_the_kind(write, signature, of_group, is_async):
    reward, one = loaded(f"{write(f'{signature}: return None')}:f")
    assert (reward.of_group, one.facts.is_async) == (of_group, is_async)


@pytest.mark.parametrize(
    ("signature", "args", "given"),
    [
        ("completion, step", {}, {"completion": "c", "step": 4}),
        ("completion, **rest", {"k": 1}, {"completion": "c", "step": 4, "answer": "7", "k": 1}),
        ("completion, target=None", {}, {"completion": "c"}),  # need not be filled
        ("completion, answer=None", {}, {"completion": "c", "answer": "7"}),
    ],
)
def test_arguments_are_what_the_function_names(write, signature, args, given):
    reward, _ = loaded(f"{write(f'def f({signature}): ...')}:f", {"answer"}, args=args)
    assert reward.arguments({"completion": "c", "step": 4, "answer": "7"}) == given


@pytest.mark.parametrize(
    ("error", "signature", "columns", "args", "said"),
    [
        (DataError, "def f(completion, anser)", {"answer"}, {}, ["`anser`", "did you mean `answer`?"]),
        (DataError, "def f(completions, prompt)", set(), {}, ["`prompt`", "did you mean `prompts`?"]),
        (DataError, "def f(completion, limit)", set(), {}, ["`limit`"]),
        (RewardError, "def f(completion, limit=1)", set(), {"limt": 2}, ["`limt`", "limit"]),
        (RewardError, "def f(completion)", set(), {"completion": "x"}, ["`completion`"]),
        (RewardError, "def f(completion, /)", set(), {}, ["`completion` is positional-only"]),
    ],
)
@pytest.mark.fault(20)
def test_a_parameter_that_cannot_be_filled_is_an_error(write, proof, error, signature, columns, args, said):
    with pytest.raises(error) as caught:
        loaded(f"{write(f'{signature}: return 1.0')}:f", columns, args=args)
    assert all(part in str(caught.value) for part in (*said, "rewards.py:f"))
    assert caught.value.exit_code == (4 if error is DataError else 5)
    proof(str(caught.value)[-80:])


@pytest.mark.parametrize(
    ("use", "said"),
    [
        ("{folder}/rewards.py:brevty", "did you mean `brevity`"),
        ("{folder}/nowhere.py:f", r"nowhere\.py does not exist"),
        ("no_such_package_anywhere.rewards:f", "no_such_package_anywhere"),
    ],
)
def test_a_missing_file_module_or_function(write, use, said):
    folder = write("def brevity(completion): return 1.0\n").parent
    with pytest.raises(RewardError, match=said):
        loaded(use.format(folder=folder))
