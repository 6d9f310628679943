"""The flat list of options."""

from tandem.config.fields import nearest, options, tables


def test_options_and_tables():
    assert options()["engine.infer.block_size"].flag == "--engine.infer.block-size"
    assert options()["algorithm.clip_low"].optional
    assert options()["engine.numerics"].choices == ("exact", "fast")
    assert "engine.infer" in tables() and "engine.infer" not in options()


def test_nearest_by_place_and_by_key():
    assert "rollout.group_size" in nearest("trainer.group_size")
    assert "rollout.group_size" in nearest("rollout.grup_size")
    assert "--engine.infer.max-num-seqs" in nearest("max_num_seq", flag=True)
