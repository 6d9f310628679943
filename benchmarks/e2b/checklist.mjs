// What a user of E2B's JavaScript SDK does, once each; see checklist.py.
// Usage: node checklist.mjs FOLDER_WITH_NODE_MODULES
import { createRequire } from 'node:module'
import { pathToFileURL } from 'node:url'
import { mkdtempSync, writeFileSync } from 'node:fs'
import { tmpdir } from 'node:os'
import { join } from 'node:path'

const require = createRequire(join(process.argv[2], 'index.js'))
const load = async (name) => {
  const module = await import(pathToFileURL(require.resolve(name)).href)
  return module.default?.Sandbox ? { ...module.default, ...module } : module
}
const { Sandbox, Template } = await load('e2b')
const results = {}
const need = (condition, what) => {
  if (!condition) throw new Error(JSON.stringify(what))
}
const check = async (name, work) => {
  try {
    await work()
    results[name] = 'ok'
  } catch (error) {
    console.error(name, error)
    results[name] = String(error).slice(0, 300)
  }
}

const box = await Sandbox.create({ timeoutMs: 300_000, metadata: { check: 'js' }, envs: { OTHER: 'fixed' } })

await check('create_and_run', async () => {
  const done = await box.commands.run('echo hello $OTHER; echo oops >&2')
  need(done.stdout === 'hello fixed\n' && done.stderr === 'oops\n' && done.exitCode === 0, done)
  const failed = await box.commands.run('exit 7').catch((error) => error)
  need(failed.exitCode === 7, failed)
})
await check('stream', async () => {
  const parts = []
  await box.commands.run('for i in 1 2 3; do echo $i; sleep 0.1; done', { onStdout: (part) => parts.push(part) })
  need(parts.join('') === '1\n2\n3\n', parts)
})
await check('background_and_list_and_kill', async () => {
  const command = await box.commands.run('sleep 100', { background: true })
  need((await box.commands.list()).some((one) => one.pid === command.pid), 'not listed')
  need(await command.kill(), 'not killed')
})
await check('reconnect', async () => {
  const command = await box.commands.run('sleep 1; echo late', { background: true })
  await command.disconnect()
  need((await (await box.commands.connect(command.pid)).wait()).stdout === 'late\n', 'late')
})
await check('stdin', async () => {
  const command = await box.commands.run('head -1', { background: true, stdin: true })
  await box.commands.sendStdin(command.pid, 'words\n')
  need((await command.wait()).stdout === 'words\n', 'head')
})
await check('time_limit', async () => {
  const failed = await box.commands.run('sleep 50', { timeoutMs: 1000 }).catch((error) => error)
  need(failed.name === 'TimeoutError', failed)
})
await check('files', async () => {
  await box.files.write('folder/a.txt', 'text')
  need((await box.files.read('folder/a.txt')) === 'text', 'read')
  need((await box.files.list('folder')).map((one) => one.name).join() === 'a.txt', 'list')
  need((await box.files.exists('folder/a.txt')) && !(await box.files.exists('folder/b')), 'exists')
  await box.files.rename('folder/a.txt', 'folder/b.txt')
  await box.files.remove('folder/b.txt')
  need((await box.files.makeDir('js/deep')) === true, 'makeDir')
})
await check('watch', async () => {
  await box.files.makeDir('watched')
  const seen = []
  const handle = await box.files.watchDir('watched', (event) => seen.push(event.name))
  await box.files.write('watched/new', 'x')
  for (let i = 0; i < 50 && !seen.includes('new'); i++) await new Promise((done) => setTimeout(done, 100))
  await handle.stop()
  need(seen.includes('new'), seen)
})
await check('terminal', async () => {
  const heard = []
  const pty = await box.pty.create({ cols: 80, rows: 24, onData: (data) => heard.push(Buffer.from(data)) })
  await box.pty.sendInput(pty.pid, new TextEncoder().encode('stty size; exit\n'))
  await pty.wait().catch(() => {})
  need(Buffer.concat(heard).toString().includes('24 80'), Buffer.concat(heard).toString())
})
await check('listing_and_metadata', async () => {
  const found = []
  const paginator = Sandbox.list({ query: { metadata: { check: 'js' } }, limit: 1 })
  while (paginator.hasNext) found.push(...(await paginator.nextItems()))
  need(found.some((one) => one.sandboxId === box.sandboxId), found)
})
await check('timeout', async () => {
  await box.setTimeout(900_000)
  need(await box.isRunning(), 'isRunning')
})
await check('pause_and_connect', async () => {
  await (box.pause ?? box.betaPause).call(box)
  const again = await Sandbox.connect(box.sandboxId)
  need((await again.commands.run('echo back')).stdout === 'back\n', 'back')
})
await check('fork', async () => {
  await box.commands.run('echo parent > /tmp/state')
  for (const child of await box.fork({ count: 2, timeoutMs: 120_000 })) {
    if (child instanceof Error) throw child
    need((await child.commands.run('cat /tmp/state')).stdout === 'parent\n', 'child')
    await child.kill()
  }
})
await check('snapshot', async () => {
  await box.commands.run('echo kept > ~/kept')
  const made = await box.createSnapshot()
  const fresh = await Sandbox.create(made.snapshotId, { timeoutMs: 120_000 })
  need((await fresh.commands.run('cat ~/kept')).stdout === 'kept\n', 'kept')
  await fresh.kill()
})
await check('template_with_copy', async () => {
  const folder = mkdtempSync(join(tmpdir(), 'template-'))
  writeFileSync(join(folder, 'data.txt'), 'copied\n')
  const template = Template({ fileContextPath: folder }).fromTemplate('base').copy('data.txt', '/opt/data.txt')
  await Template.build(template, 'check-js-template:v1')
  const fresh = await Sandbox.create('check-js-template:v1', { timeoutMs: 120_000 })
  need((await fresh.commands.run('cat /opt/data.txt')).stdout === 'copied\n', 'data')
  await fresh.kill()
})
await check('code_interpreter', async () => {
  const { Sandbox: Interpreter } = await load('@e2b/code-interpreter')
  const inner = await Interpreter.create({ timeoutMs: 120_000 })
  await inner.runCode('x = 41')
  const done = await inner.runCode("print('said'); x + 1")
  need(done.text === '42' && done.logs.stdout.join('') === 'said\n', done)
  await inner.kill()
})
await check('kill', async () => {
  await box.kill()
  need(!(await box.isRunning()), 'is running after kill')
})
console.log(JSON.stringify(results))
process.exit(0)
