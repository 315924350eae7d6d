"""What a run must survive: one line a fault or bad input, by number. `make faults` prints a table of them.

A test says which it shows with `@pytest.mark.fault(62)`, and by the fixture `proof` how it knows that the fault happened.
"""

# Cannot be shown without a CUDA device. 41 and 42 are shown with errors and numbers of CUDA that are planted on the CPU; with the
# memory of a real GPU they were not run.
GPU: frozenset[int] = frozenset()
# There is nothing yet that it could happen to.
ABSENT = {90: "no built-in reward does"}

# What of a fault is not shown here, though the rest of it is.
PARTLY = {51: "an engine on a GPU", 57: "an engine on a GPU", 58: "an engine on a GPU", 63: "vLLM on a GPU"}

CASES = {
    # recipe and command line
    1: "unknown key, anywhere",
    2: "five mistakes in one file",
    3: "wrong types",
    4: "inf, nan, negative, 0, 1e308 in every number",
    5: "one key twice",
    6: "broken YAML and odd encodings",
    7: "YAML tags that construct objects",
    8: "recipe missing, folder, unreadable, URL, stdin",
    9: "bad --set",
    10: "extends: cycle, missing parent, parent with errors",
    11: "key renamed or removed",
    12: "fields that contradict each other",
    13: "unknown trainer, reward, schedule",
    14: "typo in a command or option",
    15: "validate without GPU, network, torch",
    16: "--dry-run",
    17: "run directory already used; --clean",
    18: "no terminal, no colour, 40 columns, closed pipe",
    # data
    19: "column missing",
    20: "a reward needs a column that is not there",
    21: "data empty, too small, all filtered out",
    22: "malformed messages",
    23: "tokenizer without template or pad, pad = EOS",
    24: "duplicate prompts",
    25: "hub unreachable or refusing",
    26: "values of an unexpected type in the column `answer`",
    # rewards
    27: "reward cannot be imported",
    28: "reward raises on one sample",
    29: "reward raises beyond its budget",
    30: "reward sleeps for ever",
    31: "reward holds the GIL in C",
    32: "reward dies, forks, allocates",
    33: "equal rewards in a group, in a batch",
    34: "no reward applies",
    35: "async reward: HTTP errors, retries of its own",
    36: "judge answers nonsense",
    37: "built-ins on odd completions",
    # model, loading, memory
    38: "model id wrong, no config, pickled weights",
    39: "model needs remote code",
    40: "tokenizer does not fit the model or the engine",
    41: "CUDA out of memory (planted)",
    42: "GPU memory held by another process (made up)",
    43: "longest possible batch",
    44: "no bf16, no CUDA",
    # numerics
    45: "loss or gradient not finite",
    46: "not finite in one process only",
    47: "all completions truncated, empty, masked",
    48: "checkpoint with a non-finite parameter",
    49: "health rule broken",
    # generation and weight sync
    50: "server not there, other model, other token",
    51: "server killed while idle, while answering",
    52: "server hangs while it says it is healthy",
    53: "answer that was aborted",
    54: "sync with wrong, missing, old tensors",
    55: "sync that moved nothing",
    56: "sync that never ends",
    57: "sleep that drops the weights",
    58: "adapter not attached in the engine",
    59: "samples older than max_staleness",
    60: "returned ids are not the trained ids",
    61: "server of an earlier run",
    # checkpoint and resume
    62: "SIGKILL at every write of a save",
    63: "killed and resumed equals undisturbed",
    64: "resume with another number of processes",
    65: "checkpoint file damaged, missing, added",
    66: "checkpoint of another rlgen, model, trainer",
    67: "killed while old checkpoints are deleted",
    68: "resume with a changed recipe or reward",
    69: "resume of a finished run",
    70: "storage shared by machines",
    71: "rollouts and metrics beyond the resumed step",
    72: "export that is interrupted, or whose base model has changed",
    # processes and signals
    73: "SIGTERM in each phase",
    74: "SIGINT twice",
    75: "one process raises, dies, hangs",
    76: "processes that execute different code",
    77: "a launch inside a launch",
    78: "parent killed",
    79: "launcher restarts",
    # logging and reports
    80: "tracker down",
    81: "huge, odd and hostile completions in records",
    82: "compare runs that differ",
    83: "report without display or network",
    # security
    84: "server listens beyond loopback",
    85: "bind beyond loopback without a token",
    86: "token missing or wrong",
    87: "secret in an error's text",
    88: "malicious pickle in a checkpoint",
    89: "reward from outside the recipe's folder",
    90: "reward that executes code from a completion",
    91: "loose permissions",
    92: "connections that the recipe does not name",
}
