-- Prepended to every script: names of the keys, the check for lost data, the queue's clock, the wake-up notice.
local ST, Q, LEASE, SEEN, DONE = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local DEAD, TRIES, WAKE = KEYS[6], KEYS[7], KEYS[8]

-- A lease score above POOL is a deadline in ms. A score below it is the ticket itself: the ticket is in the pool, not
-- leased, and waits to be issued again, lowest ticket first. (POOL is in the year 2001; the queue's clock starts later.)
local POOL = '1000000000000'

local NUMBERS = { 'issued', 'low', 'version', 'void', 'epoch', 'ready', 'base', 'began', 'wake', 'clock', 'wall' }
local TEXTS = { 'fence', 'phase', 'cursor', 'mark', 'progressed', 'refused', 'lineage', 'beginning' }

local function num(field)
  return tonumber(redis.call('HGET', ST, field) or '0')
end

-- Returns the number of elements of a key; nil if the key has another type.
local function size(command, key)
  local n = redis.pcall(command, key)
  return type(n) == 'number' and n or nil
end

-- Checks that the keys hold everything that `begin` and later scripts wrote. Every issued ticket of an open queue is
-- finished, queued or leased, so the sizes of the keys add up. Reads a constant number of values.
local function whole()
  if not size('HLEN', ST) then return false end
  for _, value in ipairs(redis.call('HMGET', ST, unpack(NUMBERS))) do
    if not string.match(value or '', '^%d+$') then return false end
  end
  for _, value in ipairs(redis.call('HMGET', ST, unpack(TEXTS))) do
    if not value then return false end
  end
  local entries, queued = size('XLEN', Q), size('HLEN', SEEN)
  local leased, done = size('ZCARD', LEASE), size('SCARD', DONE)
  if not (entries and queued and leased and done) or entries < queued then return false end
  return redis.call('HGET', ST, 'phase') ~= 'open' or num('issued') - num('low') == queued + leased + done
end

-- Treats partial loss as total loss: the next trainer restores the queue from its log.
local function forget()
  redis.call('UNLINK', ST, Q, LEASE, SEEN, DONE, TRIES, WAKE)
end

for key, command in pairs({ [DEAD] = 'XLEN', [TRIES] = 'HLEN', [WAKE] = 'XLEN' }) do
  if not size(command, key) then redis.call('UNLINK', key) end
end
if not whole() then forget() end

-- The queue's own clock in ms. It follows the server's clock, but never goes back, and advances by at most half a lease
-- between two readings: holders renew leases three times per lease, so a clock jump expires none of them.
local function now_ms()
  local t = redis.call('TIME')
  local wall, most = tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000), num('lease_ms') / 2
  local passed = math.max(0, wall - num('wall'))
  if most > 0 then passed = math.min(passed, math.floor(most)) end
  local now = num('clock') + passed
  if num('clock') == 0 then now = math.max(wall, tonumber(POOL) + 1) end
  redis.call('HSET', ST, 'wall', wall, 'clock', string.format('%.0f', now))
  return now
end

local function is_finished(ticket)
  return ticket <= num('low') or redis.call('SISMEMBER', DONE, ticket) == 1
end

-- Makes everyone who waits for a ticket ask again. The stream keeps one entry; its id is a counter.
local function wake()
  local n = redis.call('HINCRBY', ST, 'wake', 1)
  redis.call('XADD', WAKE, 'MAXLEN', 1, n .. '-0', 'n', n)
end

-- Removes every trace of a finished ticket.
local function clear(ticket, group, entry)
  local queued = redis.call('HGET', SEEN, ticket)
  if queued then
    redis.call('XACK', Q, group, queued)
    redis.call('XDEL', Q, queued)
    redis.call('HDEL', SEEN, ticket)
  end
  if entry ~= '' and entry ~= queued then
    redis.call('XACK', Q, group, entry)
    redis.call('XDEL', Q, entry)
  end
  redis.call('ZREM', LEASE, ticket)
  redis.call('HDEL', TRIES, ticket)
end
