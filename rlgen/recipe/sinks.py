"""Holds the models of the section `sinks`: trackers that receive a copy of a run's records."""

from typing import Annotated, Literal

from pydantic import Field, StrictInt, StrictStr

from rlgen.recipe.fields import Count, Strict, Text


class Sink(Strict):
    """What all trackers have in common."""

    name: Text | None = None
    """Name of the run in the tracker. None: run.name."""
    every: Count = 1
    """Interval in steps at which metrics and samples are sent. Evaluations and the last step are always sent."""
    samples: Annotated[StrictInt, Field(ge=0, le=1000)] = 8
    """Samples in a step's table, each with prompt, completion, rewards and advantage. 0: no tables."""


class TrackioSink(Sink):
    kind: Literal["trackio"]
    """trackio: a data base on this machine, shown by `trackio show`, or a Space of the hub."""
    project: Text = "rlgen"
    """Project of the run."""
    space_id: Text | None = None
    """Space of the hub, such as me/curves; the hub's login is used. None: TRACKIO_SPACE_ID, or this machine."""


class WandbSink(Sink):
    kind: Literal["wandb"]
    """wandb: Weights & Biases; the key comes from `wandb login` or WANDB_API_KEY."""
    project: Text = "rlgen"
    """Project of the run."""
    entity: Text | None = None
    """User or team that owns the project. None: the owner of the API key."""
    group: Text | None = None
    """Group of runs that are shown together, such as seeds."""
    tags: Annotated[list[Text], Field(max_length=100)] = []
    """Tags of the run."""
    mode: Literal["online", "offline"] | None = None
    """offline: files in the run's folder, which `wandb sync` sends. None: WANDB_MODE, or online."""


class TensorboardSink(Sink):
    kind: Literal["tensorboard"]
    """tensorboard: event files."""
    folder: Text | None = None
    """Folder of the event files; relative to the working directory. None: sinks/tensorboard in the run's folder."""


class MlflowSink(Sink):
    kind: Literal["mlflow"]
    """mlflow: a tracking server, or a folder."""
    uri: Text | None = None
    """Tracking server or folder; relative to the working directory. None: MLFLOW_TRACKING_URI, or the folder mlruns."""
    experiment: Text = "rlgen"
    """Experiment of the run."""
    tags: dict[StrictStr, StrictStr] = {}
    """Tags of the run."""


SinkRecipe = Annotated[TrackioSink | WandbSink | TensorboardSink | MlflowSink, Field(discriminator="kind")]
