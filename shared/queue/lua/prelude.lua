-- Put in front of every script: names of the keys, the server's clock, the wake-up notice.
local ST, Q, LEASE, SEEN, DONE = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local DEAD, TRIES, WAKE = KEYS[6], KEYS[7], KEYS[8]

-- A lease score above POOL is a deadline in ms. A score below it is the ticket itself: the ticket is in the pool, owned
-- by nobody, and waits to be issued again, lowest ticket first. (POOL is the year 2001, so no clock reads below it.)
local POOL = '1000000000000'

local function now_ms()
  local t = redis.call('TIME')
  return tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
end

local function num(field)
  return tonumber(redis.call('HGET', ST, field) or '0')
end

local function is_finished(ticket)
  return ticket <= num('low') or redis.call('SISMEMBER', DONE, ticket) == 1
end

-- Tells everyone who waits for a ticket to ask again. The stream keeps one notice; its id is a counter.
local function wake()
  local n = redis.call('HINCRBY', ST, 'wake', 1)
  redis.call('XADD', WAKE, 'MAXLEN', 1, n .. '-0', 'n', n)
end

-- Removes a finished ticket from wherever it still is.
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
