"""A test that a target reaches only the layers below it."""

def layer_test(name, target, may_reach):
    """Fails if `target` depends, however indirectly, on anything outside its own package tree and `may_reach`.

    Args:
      name: the test.
      target: the public target of a layer, or another target to hold in its place.
      may_reach: packages (with all below them) and external repositories: ["//mesh", "@absl"].
    """
    own = target.split(":")[0]
    allowed = "^(%s)" % "|".join(["%s[:/]" % place for place in [own] + may_reach])
    native.genquery(
        name = name + "_forbidden",
        expression = "deps({target}) except filter(\"{allowed}\", deps({target}))".format(target = target, allowed = allowed),
        # Not what the compiler itself is made of.
        opts = [
            "--noimplicit_deps",
            "--notool_deps",
        ],
        scope = [target],
        testonly = True,
    )
    native.sh_test(
        name = name,
        size = "small",
        srcs = ["layer_test.sh"],
        args = [
            target,
            "$(rootpath :%s_forbidden)" % name,
        ],
        data = [":%s_forbidden" % name],
    )
