"""Fits of the efficiency curves to tables of measured operators: `python -m tuner.cost_model.fit TABLES -o configs/calibrations`.

The formulas are those of roofline.py and collectives.py, called with trial curves, so that what is fitted is what is used.
The tables stay outside the project; the curves and the residuals they leave go into configs/calibrations.
"""
