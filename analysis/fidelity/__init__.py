"""How far predictions stand from recordings: the study that `hoptrace fidelity` shows. No replay is run here: whoever runs them
hands the traces to :func:`hoptrace.analysis.fidelity.study.study`."""
