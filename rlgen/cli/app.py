"""Declares the commands and their options, and turns errors into messages and exit codes. Heavy modules are imported inside the
commands. Commands whose modules are light have their options there.
"""

import atexit
import os
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer
from typer import Argument, Option

import rlgen
from rlgen.cli.checkpoints import checkpoints
from rlgen.cli.docs import docs_command
from rlgen.cli.env import env_command
from rlgen.cli.export import export_command
from rlgen.cli.groups import AsJson, CheckpointStep, Overrides, RecipePath, RunPath, recipes, rewards
from rlgen.cli.guesses import understood
from rlgen.cli.output import echo, hushed, prepare
from rlgen.errors import RecipeError, RlgenError, Stopped, UsageError, redacted
from rlgen.metrics import Metric

app = typer.Typer(
    name="rlgen",
    help="Online RL for language models from one recipe: `rlgen train recipe.yaml`.",
    epilog="Example: rlgen init mine && cd mine && rlgen train recipe.yaml",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(recipes, name="recipes")
app.add_typer(checkpoints, name="checkpoints")
app.add_typer(rewards, name="rewards")


def version(value: bool) -> None:
    if value:
        echo(f"rlgen {rlgen.__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, Option("--debug", help="Show tracebacks of errors.")] = False,
    show_version: Annotated[bool, Option("--version", help="Print the version.", callback=version, is_eager=True)] = False,
) -> None:
    # `run_command` reads the variable, outside of Typer's call.
    os.environ["RLGEN_DEBUG"] = "1" if debug else os.environ.get("RLGEN_DEBUG", "")


@app.command("init", epilog="Example: rlgen init mine && cd mine && rlgen train recipe.yaml")
def call_init(folder: Annotated[Path, Argument(metavar="DIR", help="Folder to write; new, or empty.")]) -> None:
    """Write a folder to start from. It has a recipe with comments, data, rewards and their test. It trains as it is, on a CPU."""
    from rlgen.cli.inspect import init_command

    init_command(folder)


@app.command("train", epilog="Example: rlgen train recipe.yaml --set optim.learning_rate=1e-5")
def call_train(
    recipe: RecipePath,
    overrides: Overrides = None,
    resume: Annotated[bool, Option("--resume", help="Resume from the last good checkpoint of this run.")] = False,
    resume_step: Annotated[
        int | None, Option(min=1, metavar="STEP", help="Resume from the checkpoint of this step; later ones are set aside.")
    ] = None,
    allow_changed_rewards: Annotated[
        bool, Option("--allow-changed-rewards", help="Resume even if the code of a reward, a tool or an environment changed.")
    ] = False,
    clean: Annotated[
        bool, Option("--clean", help="Delete what an earlier run left in the run directory, and start anew.")
    ] = False,
    dry_run: Annotated[bool, Option("--dry-run", help="Write the resolved recipe and stop.")] = False,
    max_steps: Annotated[int | None, Option(help="Same as --set run.steps=N.")] = None,
    run_dir: Annotated[Path | None, Option(help="Run directory instead of run.dir/run.name.")] = None,
    probe_max: Annotated[bool, Option("--probe-max", help="Same as --set run.probe_max=true.")] = False,
    progress: Annotated[
        Literal["auto", "live", "plain", "json"],
        Option(help="Show a live view, plain lines, or one JSON object a step. auto: live on a terminal, plain elsewhere."),
    ] = "auto",
    prove_resume: Annotated[
        bool,
        Option(
            "--prove-resume",
            help="Test resuming: train a few steps in a new folder, kill, resume, compare. Leaves the run as it is.",
        ),
    ] = False,
) -> None:
    """Train a model as the recipe says."""
    overrides = [*(overrides or []), *(["run.probe_max=true"] if probe_max else [])]
    if prove_resume:
        from rlgen.cli.prove import prove_command

        of_a_run = {"--resume": resume, "--resume-step": resume_step, "--allow-changed-rewards": allow_changed_rewards}
        of_a_run |= {"--clean": clean, "--dry-run": dry_run, "--progress": progress != "auto"}
        if given := [option for option, value in of_a_run.items() if value]:
            raise UsageError(f"--prove-resume makes runs of its own: leave {' and '.join(given)} out")
        prove_command(recipe, overrides, max_steps, run_dir)
        return
    from rlgen.cli.train import train_command

    train_command(recipe, overrides, resume, dry_run, max_steps, run_dir, resume_step, allow_changed_rewards, clean, progress)


@app.command("doctor", epilog="Example: rlgen doctor recipe.yaml")
def call_doctor(
    recipe: RecipePath,
    overrides: Overrides = None,
    as_json: AsJson = False,
    store_baseline: Annotated[
        bool, Option("--store-baseline", help="Store the measured gaps; later calls compare theirs with them.")
    ] = False,
) -> None:
    """Check that trainer and engine agree. If not, names the cause. Trains nothing."""
    from rlgen.cli.doctor import doctor_command

    doctor_command(recipe, overrides or [], as_json, store_baseline)


@app.command("serve", epilog="Example: rlgen serve recipe.yaml --port 8000")
def call_serve(
    recipe: RecipePath,
    overrides: Overrides = None,
    host: Annotated[str | None, Option(help="Address to listen on. Default: 127.0.0.1.")] = None,
    port: Annotated[int | None, Option(min=0, max=65535, help="Port; 0 takes a free one. Default: 8000.")] = None,
    announce: Annotated[
        Path | None, Option(metavar="FOLDER", help="Keep the address in a file there; the server ends if it is removed.")
    ] = None,
) -> None:
    """Start a vLLM server for a recipe's model; training then connects to it. Ctrl-C stops it."""
    from rlgen.cli.serve import serve_command

    serve_command(recipe, overrides or [], host, port, announce)


@app.command("eval", epilog="Example: rlgen eval runs/mine recipe.yaml --step best --set eval.group_size=8")
def call_eval(
    model: Annotated[
        Path,
        Argument(
            metavar="MODEL_OR_RUN", help="A model (folder, hub id or tiny:NAME), a run (directory or name), or a checkpoint."
        ),
    ],
    recipe: RecipePath,
    overrides: Overrides = None,
    step: CheckpointStep = None,
    out: Annotated[Path | None, Option(help="Folder for the samples, as Parquet.")] = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate a model. Samples answers to the prompts of section `eval`; prints means with their intervals."""
    from rlgen.cli.evaluate import eval_command

    eval_command(model, recipe, overrides or [], step, out, as_json)


@app.command("status", epilog="Example: rlgen status mine")
def call_status(
    run: RunPath,
    as_json: AsJson = False,
    follow: Annotated[bool, Option("--follow", help="Print each new step until the run ends.")] = False,
) -> None:
    """Show how far a run is, or how it ended. Works for killed runs too."""
    from rlgen.cli.status import status_command

    status_command(run, as_json, follow)


@app.command("runs", epilog="Example: rlgen runs")
def call_runs(
    folder: Annotated[Path, Argument(metavar="[FOLDER]", help="The folder that holds the runs.")] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """List the runs of a folder: state, step, reward, evaluation, age."""
    from rlgen.cli.status import runs_command

    runs_command(folder, as_json)


@app.command("rollouts", epilog="Example: rlgen rollouts mine --step last --reward-below 0.1 --sort -length")
def call_rollouts(
    run: RunPath,
    step: Annotated[str | None, Option(metavar="RANGE", help="Only these steps: 12, 10:20, 10:, :20 or last.")] = None,
    reward_below: Annotated[float | None, Option(metavar="X", help="Only rewards below X.")] = None,
    reward_above: Annotated[float | None, Option(metavar="X", help="Only rewards above X.")] = None,
    length: Annotated[
        str | None, Option(metavar="RANGE", help="Only completions of so many tokens: 12, 10:20, 10: or :20.")
    ] = None,
    finish: Annotated[
        Literal["stop", "length"] | None,
        Option(help="Only completions that ended at a stop token (stop) or at the length limit (length)."),
    ] = None,
    text: Annotated[
        str | None, Option(help="Only rollouts with this text in prompt or completion; case does not matter.")
    ] = None,
    sort: Annotated[
        str, Option(help="step, reward, advantage, length, or gap (of engine and trainer). -reward: highest first.")
    ] = "step",
    limit: Annotated[int, Option(min=1, max=10_000, help="Rollouts per page.")] = 10,
    page: Annotated[int, Option(min=1, help="Page to show.")] = 1,
    full: Annotated[bool, Option("--full", help="Show long texts whole.")] = False,
    as_json: AsJson = False,
) -> None:
    """Read the samples of a run. Prompts, completions and rewards, filtered and sorted."""
    from rlgen.analysis.rows import Query, Range
    from rlgen.cli.rollouts import rollouts_command

    query = Query(
        steps=None if step in (None, "last") else Range.of(step, "--step"),
        reward_below=reward_below,
        reward_above=reward_above,
        length=None if length is None else Range.of(length, "--length"),
        finish=finish,
        text=text,
        sort=sort,
        newest=step == "last",
    )
    rollouts_command(run, query, limit, page, full, as_json)


@app.command("report", epilog="Example: rlgen report mine")
def call_report(
    run: RunPath,
    out: Annotated[Path | None, Option(help="File to write instead of report.html in the run's directory.")] = None,
    png: Annotated[bool, Option("--png", help="Also draw the curves into report.png, for slides; needs rlgen[report].")] = False,
    rollouts: Annotated[
        int, Option(min=0, help="Most rollouts in the report. If the run has more, the report takes every n-th step.")
    ] = 10_000,
    as_json: AsJson = False,
) -> None:
    """Write the report of a run. Curves, health, recipe and rollouts in one HTML file, which needs no network."""
    from rlgen.cli.compare import report_command

    report_command(run, out, png, rollouts, as_json)


@app.command("compare", epilog="Example: rlgen compare grpo-0 grpo-1 rloo-0 rloo-1 --by tokens --html")
def call_compare(
    runs: Annotated[list[Path], Argument(metavar="RUN", help="Run directories, or names of runs in runs/.")],
    metric: Annotated[
        str, Option(metavar="NAME", help="Metric of the verdict; rlgen docs metrics lists them.")
    ] = Metric.REWARD_MEAN.value,
    by: Annotated[Literal["step", "tokens", "time"], Option(help="The x-axis of the curves.")] = "step",
    html: Annotated[bool, Option("--html", help="Also write all curves into compare.html, which needs no network.")] = False,
    png: Annotated[bool, Option("--png", help="Also draw the curves into compare.png, for slides; needs rlgen[report].")] = False,
    out: Annotated[Path, Option(help="The HTML file; the PNG is beside it.")] = Path("compare.html"),
    as_json: AsJson = False,
) -> None:
    """Compare runs. Shows recipes, curves, and whether a metric differs. Groups runs that differ only in the seed."""
    from rlgen.cli.compare import compare_command

    compare_command(runs, metric, by, html, png, out, as_json)


@app.command("replay", epilog="Example: rlgen replay mine --step 17 --set trainer.beta=0.05")
def call_replay(
    run: RunPath,
    step: Annotated[int, Option(min=1, help="The step to compute again.")],
    overrides: Annotated[
        list[str] | None,
        Option(
            "--set",
            metavar="section.key=value",
            help="Also compute the step with this value of trainer.* or optim.*; repeatable.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compute a step again. Compares it with the record. With --set, shows what other settings would have changed."""
    from rlgen.cli.replay import replay_command

    replay_command(run, step, overrides or [], as_json)


app.command("export", epilog="Example: rlgen export mine --step best --out mine-model --push-to-hub me/mine")(export_command)


@app.command("estimate", epilog="Example: rlgen estimate recipe.yaml --gpu-gib 80")
def call_estimate(
    recipe: RecipePath,
    overrides: Overrides = None,
    gpu_gib: Annotated[
        float | None, Option(min=0.1, help="Memory of the GPU in GiB. Default: that of this machine's GPU.")
    ] = None,
    nodes: Annotated[int | None, Option(min=1, help="Machines. Default: 1, if --gpus is given.")] = None,
    gpus: Annotated[int | None, Option(min=1, help="GPUs of each machine, with a process each. Default: as the recipe.")] = None,
    gpu: Annotated[str | None, Option(help="GPU whose published numbers say how fast it is: h100, h200, a100, l40s, …")] = None,
    like: Annotated[list[Path] | None, Option(metavar="RUN", help="Run that says how fast it is; repeatable.")] = None,
    tokens_per_second: Annotated[float | None, Option(min=1e-3, help="Tokens that an engine decodes in a second.")] = None,
    train_flops: Annotated[float | None, Option(min=1.0, help="Operations a second of a process that trains.")] = None,
    bandwidth: Annotated[float | None, Option(min=1e-6, help="GB a second that a process sends to others.")] = None,
    mean_tokens: Annotated[float | None, Option(min=1.0, help="Mean length of a completion.")] = None,
    as_json: AsJson = False,
) -> None:
    """Estimate the memory of each phase and process, list settings that reduce it, and simulate the time of a step. Loads no
    weights."""
    from rlgen.cli.estimate import estimate_command
    from rlgen.cli.step_time import Machines

    machines = Machines(nodes, gpus, gpu, like or (), tokens_per_second, train_flops, bandwidth, mean_tokens)
    estimate_command(recipe, overrides or [], gpu_gib, as_json, machines)


@app.command("validate", epilog="Example: rlgen validate recipe.yaml --data 3")
def call_validate(
    recipe: RecipePath,
    overrides: Overrides = None,
    as_json: AsJson = False,
    data: Annotated[
        int,
        Option(
            "--data", min=0, max=1000, metavar="N", help="Prompts to show. 0: check the recipe alone, without its model and data."
        ),
    ] = 2,
) -> None:
    """Check a recipe: keys, values, rules, files and rewards. Shows the first prompts. Loads no weights."""
    from rlgen.cli.validate import validate_command

    validate_command(recipe, overrides or [], as_json, data)


@app.command("show", epilog="Example: rlgen show recipe.yaml | less")
def call_show(
    recipe: RecipePath,
    overrides: Overrides = None,
    resolved: Annotated[bool, Option("--resolved", help="Print the resolved recipe as YAML.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show every value of a recipe, where it comes from and what it does."""
    from rlgen.cli.inspect import show_command

    show_command(recipe, overrides or [], resolved, as_json)


@app.command("schema", epilog="Example: rlgen schema --out recipe.schema.json")
def call_schema(out: Annotated[Path | None, Option(metavar="FILE", help="File to write instead of printing.")] = None) -> None:
    """Print the JSON Schema of recipes. Begin a recipe with this line, and editors complete keys and mark mistakes:

    # yaml-language-server: $schema=recipe.schema.json
    """
    from rlgen.cli.inspect import schema_command

    schema_command(out)


app.command("docs", epilog="Example: rlgen docs --search truncated")(docs_command)
app.command("env", epilog="Example: rlgen env > env.txt")(env_command)


def main() -> None:
    leave(run_command())


def run_command() -> int:
    """Runs the command that the arguments of the process name. Prints an error as one message. Returns the exit code."""
    prepare()
    try:
        app(understood(sys.argv[1:]))
    except SystemExit as ended:  # Typer raises it on success too
        return ended.code if isinstance(ended.code, int) else 0
    except RlgenError as error:
        if os.environ.get("RLGEN_DEBUG"):
            echo(redacted(traceback.format_exc()), err=True)
        if not error.told:
            echo(str(error) if isinstance(error, RecipeError | Stopped) else f"error: {error}", err=True)
            if isinstance(error, RecipeError):
                count = len(error.problems)
                echo(f"{count} error{'s' if count > 1 else ''}; nothing was started", err=True)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if not getattr(error, "told", False):
            echo(redacted(traceback.format_exc()), err=True)
            asked = "please report it with the lines above and what `rlgen env` prints"
            echo(f"error: this is a bug in rlgen {rlgen.__version__}; {asked}", err=True)
        return 70
    return 0


def leave(code: int) -> NoReturn:
    """Ends the process with `code`, after its threads and exit functions, but without the interpreter's own cleanup.

    That cleanup takes three seconds, because it frees all objects of torch and vLLM one at a time. With several ranks it may also
    abort (SIGABRT) in threads of process groups that other ranks are leaving, and the launcher would see that instead of the exit
    code. Destroying the groups first could wait forever for a rank that hangs.

    Output that cannot be written, such as to a closed pipe, is not an error.
    """
    flush_streams()
    with suppress(KeyboardInterrupt):
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    flush_streams()
    os._exit(code)


def flush_streams() -> None:
    """Flushes standard output and standard error. A stream that cannot be written is discarded."""
    for stream in (sys.stdout, sys.stderr):
        with hushed(stream):
            stream.flush()
