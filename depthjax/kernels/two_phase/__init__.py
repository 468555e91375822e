"""The two phases of reading a block's sources (Attention Residuals, arXiv 2603.15031, section on
two-phase evaluation): queries are parameters, so all S of a block score the N finished blocks at
once, and each sublayer then adds the one source that grows, the open sum p of its block.

Phase 1, with u_s = query_s * key_scale_s, over the finished blocks v_i:

    e_si = u_s . v_i rho_i,    rho_i = 1 / sqrt(mean(v_i^2) + eps)
    o_s  = sum_i exp(e_si - lse_s) v_i,    lse_s = log sum_i exp(e_si)

Phase 2, after a branch returned, for the sublayer that reads next:

    p = open sum + branch        or the branch alone, where a block has just been closed
    w = sigmoid(u . p rho(p) - lse),    h = o + w (p - o),    x = norm_scale * RMSNorm(h)

The results equal those of one softmax over all sources. What is stored, o, is a convex combination
of sources, so that bfloat16 holds it as well as them.
"""
