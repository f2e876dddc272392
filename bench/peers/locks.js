// Locks that are used from Node.js, played for the benchmark: see bench/src/peers/mod.rs for what is said on
// standard input and output.
//
//     locks.js PEER DIR      PEER is a name in PEERS below
'use strict';
const fs = require('fs');
const readline = require('readline');

// Each makes { take, release }. `take` waits. Its default first pause of 1 s would make it ten times slower in a
// crowd: 1 to 20 ms it is.
const PEERS = {
  'proper-lockfile': (folder) => {
    const lockfile = require('proper-lockfile');
    const file = `${folder}/proper.json`;
    fs.writeFileSync(file, '{}');
    const retries = { forever: true, minTimeout: 1, maxTimeout: 20, factor: 1.5, randomize: true };
    let release;
    return {
      take: async () => { release = await lockfile.lock(file, { retries }); },
      release: () => release(),
    };
  },
};

const now = () => Number(process.hrtime.bigint()) / 1e9;

async function rate({ take, release }, seconds) {
  const start = now();
  for (let done = 1; ; done++) {
    await take();
    await release();
    const spent = now() - start;
    if (spent >= seconds) return done / spent;
  }
}

async function count({ take, release }, path, total) {
  for (let share = 0; ; share++) {
    await take();
    try {
      const value = JSON.parse(fs.readFileSync(path));
      if (value.counter >= total) return share;
      value.counter += 1;
      fs.writeFileSync(path, JSON.stringify(value));
    } finally {
      await release();
    }
  }
}

async function main() {
  const [peer, folder] = process.argv.slice(2);
  const lock = PEERS[peer](folder);
  console.log('ready');
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const [verb, argument] = line.split(' ');
    switch (verb) {
      case 'rate': console.log(await rate(lock, Number(argument))); break;
      case 'count': console.log(await count(lock, `${folder}/counter.json`, Number(argument))); break;
      case 'take': await lock.take(); console.log('taken'); break;
      case 'release': await lock.release(); console.log('released'); break;
      default: throw new Error(`not understood: ${line}`);
    }
  }
  process.exit(0);
}

main().catch((error) => { console.error(error); process.exit(1); });
