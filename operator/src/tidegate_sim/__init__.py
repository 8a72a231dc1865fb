"""A second shell around the operator's decision core and the engine's scheduler: traffic and fleets in virtual time."""
