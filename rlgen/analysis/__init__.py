"""Shows what a run has left in its folder: its rollouts, a report, a comparison with others. It changes nothing of the run."""
