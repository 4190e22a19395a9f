"""Where step costs come from, one file a kind. :func:`hoptrace.replay.cost.choose_cost` is their front."""
