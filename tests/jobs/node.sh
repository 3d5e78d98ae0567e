# Node: the file system's calls of all three kinds, streams, threads and other programs.
cat >job.mjs <<'JS'
import { spawnSync, spawn, execFileSync, fork } from 'node:child_process'
import { createHash } from 'node:crypto'
import fs from 'node:fs'
import { open, readFile, readdir, mkdir, rm, rename, stat, writeFile, appendFile, symlink, readlink, cp, truncate, utimes,
  chmod, access, copyFile, mkdtemp, link, realpath, opendir, constants } from 'node:fs/promises'
import { pipeline } from 'node:stream/promises'
import { createGunzip, createGzip } from 'node:zlib'
import { once } from 'node:events'
import { promisify } from 'node:util'
import { Worker } from 'node:worker_threads'

const say = (...words) => console.log(...words)
const code = async (promise) => promise.then(() => 'done', (error) => error.code)

// The calls that wait.
fs.mkdirSync('sync/deep/er', { recursive: true })
const descriptor = fs.openSync('sync/file', 'w+', 0o640)
say('sync', fs.writeSync(descriptor, 'hello'), fs.writevSync(descriptor, [Buffer.from(' '), Buffer.from('world')]))
fs.fdatasyncSync(descriptor)
const buffer = Buffer.alloc(20)
say('sync', fs.readSync(descriptor, buffer, 0, 20, 0), buffer.toString('latin1', 0, 11), fs.fstatSync(descriptor).size)
fs.ftruncateSync(descriptor, 5)
fs.fchmodSync(descriptor, 0o600)
fs.futimesSync(descriptor, 1000, 2000)
say('sync', fs.fstatSync(descriptor).mtimeMs, (fs.fstatSync(descriptor).mode & 0o777).toString(8))
fs.closeSync(descriptor)
for (let number = 0; number < 200; number++) fs.writeFileSync(`sync/deep/${number}`, String(number))
say('sync', fs.readdirSync('sync', { recursive: true }).length, fs.existsSync('sync/none'))
for (const [what, call] of Object.entries({
  'no file': () => fs.readFileSync('none'), 'a directory': () => fs.readFileSync('sync'), 'not empty': () => fs.rmdirSync('sync'),
  'there already': () => fs.mkdirSync('sync'), 'exclusive': () => fs.openSync('sync/file', 'wx') })) {
  try { call(); say(what, 'done') } catch (error) { say(what, error.code) }
}
fs.renameSync('sync/deep/7', 'sync/seven')
fs.copyFileSync('sync/seven', 'sync/copied', fs.constants.COPYFILE_EXCL)
fs.rmSync('sync/deep', { recursive: true })
say('sync', fs.readdirSync('sync').sort().join())

// Promises: the calls run in the threads of a pool, many at a time.
await mkdir('promised/a/b', { recursive: true })
await Promise.all(Array.from({ length: 300 }, (_, number) => writeFile(`promised/a/${number}`, `${number}\n`.repeat(number))))
const texts = await Promise.all(Array.from({ length: 300 }, (_, number) => readFile(`promised/a/${number}`, 'utf8')))
say('promised', texts.reduce((sum, text) => sum + text.length, 0), (await readdir('promised/a')).length)
await Promise.all(Array.from({ length: 100 }, (_, number) => appendFile('promised/log', `entry ${number}\n`)))
// They come in any order, each whole.
const entered = (await readFile('promised/log', 'utf8')).trimEnd().split('\n').sort()
say('promised', entered.length, new Set(entered).size)
await writeFile('promised/log', entered.map((line) => line + '\n'))
await symlink('log', 'promised/link')
await link('promised/log', 'promised/hard')
say('promised', await readlink('promised/link'), (await stat('promised/link')).nlink, (await realpath('promised/link')).endsWith('/log'))
const file = await open('promised/handle', 'w+')
await file.write('0123456789', 5)
await file.appendFile('more')
await file.truncate(12)
await file.sync()
await file.chmod(0o604)
say('promised', JSON.stringify((await file.readFile('latin1'))), (await file.stat()).size)
const lines = await open('promised/log')
let count = 0
for await (const line of lines.readLines()) count += line.length
say('promised', count)
await file.close()
await utimes('promised/handle', 11, 22)
await chmod('promised/handle', 0o444)
await truncate('promised/log', 30)
await copyFile('promised/log', 'promised/short')
await cp('promised/a', 'promised/copied', { recursive: true, preserveTimestamps: true })
await rename('promised/copied', 'promised/moved')
say('promised', (await readdir('promised/moved')).length, (await stat('promised/handle')).mtimeMs)
say('promised', await code(access('none', constants.R_OK)), await code(rm('promised')), await code(rename('none', 'some')),
  await code(open('promised/handle', 'wx')), await code(link('promised/a', 'hard')), await code(readlink('promised/log')))
const made = await mkdtemp('temporary-')
say('promised', made.length, (await readdir(made)).length)
await rm(made, { recursive: true })
let entries = 0
for await (const entry of await opendir('promised/a')) entries += entry.isFile() ? 1 : 0
say('promised', entries)
await rm('promised/moved', { recursive: true })

// Callbacks, and streams.
await promisify(fs.writeFile)('called', Buffer.alloc(300000, 'abc'))
await pipeline(fs.createReadStream('called'), createGzip(), fs.createWriteStream('called.gz'))
await pipeline(fs.createReadStream('called.gz', { highWaterMark: 1000 }), createGunzip(), fs.createWriteStream('again'))
const digest = (name) => createHash('sha256').update(fs.readFileSync(name)).digest('hex').slice(0, 16)
say('streams', digest('called') === digest('again'), digest('again'))
const appended = fs.createWriteStream('appended', { flags: 'a' })
for (let number = 0; number < 5000; number++) if (!appended.write(`${number}\n`)) await once(appended, 'drain')
appended.end()
await once(appended, 'finish')
let bytes = 0
for await (const chunk of fs.createReadStream('appended', { start: 100, end: 20099 })) bytes += chunk.length
say('streams', bytes, digest('appended'))

// Threads that work on the same directory.
const worker = `
  const { workerData, parentPort } = require('node:worker_threads'), fs = require('node:fs')
  let sum = 0
  for (let turn = 0; turn < 50; turn++) {
    fs.writeFileSync('threads/' + workerData + '-' + turn, 'x'.repeat(turn))
    fs.appendFileSync('threads/shared', workerData + ' ' + turn + '\\n')
    sum += fs.readFileSync('threads/' + workerData + '-' + turn).length
  }
  parentPort.postMessage(sum)`
fs.mkdirSync('threads')
const workers = Array.from({ length: 4 }, (_, number) => new Worker(worker, { eval: true, workerData: number }))
say('threads', (await Promise.all(workers.map(async (each) => (await once(each, 'message'))[0]))).join())
await Promise.all(workers.map((each) => each.terminate()))
say('threads', fs.readdirSync('threads').length, new Set(fs.readFileSync('threads/shared', 'utf8').trim().split('\n')).size)
fs.rmSync('threads/shared')

// Other programs: with descriptors of files here, pipes, and a copy of this one.
fs.mkdirSync('children')
const output = fs.openSync('children/output', 'a')
say('children', spawnSync('sh', ['-c', 'echo one; echo two >&2; cat ../called | wc -c'], { cwd: 'children', stdio: ['ignore', output, output] }).status)
fs.writeSync(output, 'of this one\n')
fs.closeSync(output)
say('children', JSON.stringify(fs.readFileSync('children/output', 'latin1')))
say('children', execFileSync('sort', ['-n'], { input: '3\n1\n2\n', encoding: 'latin1' }).split('\n').join())
const child = spawn('cat', [], { stdio: ['pipe', fs.openSync('children/cat', 'w'), 'inherit'] })
fs.createReadStream('appended').pipe(child.stdin)
say('children', (await once(child, 'close'))[0], digest('children/cat') === digest('appended'))
fs.writeFileSync('forked.mjs', "import fs from 'node:fs'; process.on('message', (n) => { fs.writeFileSync(`children/forked-${n}`, '' + n); process.send(n + 1); if (n > 2) process.disconnect() })")
const forked = fork('./forked.mjs')
for (let number = 0; number < 4; number++) {
  forked.send(number)
  say('children', (await once(forked, 'message'))[0])
}
await once(forked, 'exit')
process.on('exit', () => fs.writeFileSync('at-the-end', 'written while it ends'))
JS
node job.mjs
# A project of modules, as web tools have it.
mkdir -p project/node_modules
for module in $(seq 1 60); do
  mkdir "project/node_modules/m$module"
  printf '{"name":"m%s","version":"1.0.0","main":"lib/index.js"}' "$module" >"project/node_modules/m$module/package.json"
  mkdir "project/node_modules/m$module/lib"
  [ "$module" = 60 ] && next=0 || next="require('m$((module + 1))')"
  printf 'module.exports = %s + %s\n' "$module" "$next" >"project/node_modules/m$module/lib/index.js"
done
echo "console.log(require('m1'))" >project/main.js
(cd project && node main.js && node --check main.js && echo checked)
rm -r project
manifest .
