"""How wrong the model is: published rows in, errors, ranks and regrets out (`tuner validate`)."""
