"""Whether a model is right, and the evidence of trajectories about its unknowns.

A step of the model predicts the next state, N(m, C); the residual r = x' − m is all that data add.
Everything here is made of it:

    steps        residuals, slopes ∂m/∂u and weights C⁻¹ of single steps
    evidence     score and information of unknowns
    drift        least squares of the drift's parameters; `features` for drifts that are linear
    noise        diffusion, readout noise, whiteness
    regression   E[r | x] = 0? and the bias of a gradient where not
    guard        v = 1? and tests against common faults
"""
