"""Reward functions that take the box."""


async def answer_file_is_right(box, task):
    return (await box.files.read("answer.txt")).decode().strip() == task.private["answer"]


async def exit_code(episode, box):
    return (await box.commands.run("exit 3", timeout_s=30)).exit_code


async def writes_and_lists(box):
    await box.files.write("made/by/reward.txt", "x")
    result = await box.commands.run(["cat", "made/by/reward.txt"], timeout_s=30)
    return result.stdout == "x" and "reward.txt" in await box.files.list("made/by")


async def is_missing(box):
    try:
        await box.files.read("nothing.txt")
    except FileNotFoundError:
        return 1
    return 0


async def asks_too_much(box):
    await box.kill()


async def loops_without_asking(box):
    while True:
        pass


async def hangs_in_the_box(box):
    await box.commands.run("sleep 600", timeout_s=600)
    return 1
