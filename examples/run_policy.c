/* Runs an exported policy in C, without Python: `sebulba export RUN --to onnx`.

   gcc -O2 run_policy.c -o run_policy -ldl
   ./run_policy libonnxruntime.so policy.onnx < observations

   It reads the numbers of one observation after the other from standard input, separated by spaces or
   ends of lines, and prints a line with an action for each: a whole number for each choice, or a force
   for each dimension. Images are numbers from 0 to 255, with the channels where the environment has
   them; a Dict is the numbers of its parts, in the order of the model's inputs. A policy that looks at
   rewards, as those of R2D2 do, has an input `reward`: the reward of the step before follows then. The
   word `reset` before an observation begins a new episode, in which a policy forgets what it carried.

   Names, shapes and types of inputs and outputs are asked of the model; `policy.json` says them, too.
   What a policy carries is the input X in the next step and the output next_X in this one, but for the
   action, which is the input prev_action; all of it begins as zeros.

   libonnxruntime.so is in the wheel of onnxruntime, which has no headers. Its interface is a table of
   functions that only ever grows, so those that are needed are declared here by their places in it. */

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct Status Status; /* NULL where all is well */
typedef struct {
  const void *const *(*table)(uint32_t version);
  const char *(*version)(void);
} ApiBase;

enum { VERSION = 1 }; /* of the table: all that is used here is in the first */
enum { ERROR_MESSAGE = 2, NEW_ENV = 3, NEW_SESSION = 7, RUN = 9, NEW_OPTIONS = 10 };
enum { ONE_THREAD = 24, NUM_INPUTS = 30, NUM_OUTPUTS = 31, INPUT_TYPE = 33, OUTPUT_TYPE = 34 };
enum { INPUT_NAME = 36, OUTPUT_NAME = 37, NEW_TENSOR = 49, TENSOR_OF_TYPE = 55, ELEMENT = 60 };
enum { NUM_DIMENSIONS = 61, DIMENSIONS = 62, NEW_MEMORY = 69, ALLOCATOR = 78 };
enum { FLOAT32 = 1, UINT8 = 2, INT8 = 3, UINT16 = 4, INT16 = 5, INT32 = 6, BOOL = 9 }; /* elements */
enum { WARNINGS = 2, ARENA = 1, DEFAULT_MEMORY = 0, MOST_PORTS = 32, MOST_DIMENSIONS = 8 };

static const void *const *api;

typedef struct {
  const char *name;
  int type;
  size_t count, bytes; /* numbers, and what they take together */
  void *data, *tensor;
} Port;

static void check(Status *status) {
  if (status == NULL) return;
  const char *(*message)(const Status *) = api[ERROR_MESSAGE];
  fprintf(stderr, "onnxruntime: %s\n", message(status));
  exit(1);
}

static void fail(const char *what, const char *why) {
  fprintf(stderr, "%s: %s\n", what, why);
  exit(2);
}

static void load(const char *library) {
  void *opened = dlopen(library, RTLD_NOW);
  if (opened == NULL) fail("the library cannot be loaded", dlerror());
  const ApiBase *(*base)(void) = (const ApiBase *(*)(void))dlsym(opened, "OrtGetApiBase");
  if (base == NULL) fail(library, "is no library of onnxruntime");
  api = base()->table(VERSION);
  if (api == NULL) fail(library, "does not have version 1 of its interface");
}

static void *session_of(const char *model) {
  void *env, *options, *session;
  Status *(*new_env)(int, const char *, void **) = api[NEW_ENV];
  Status *(*new_options)(void **) = api[NEW_OPTIONS];
  Status *(*set_threads)(void *, int) = api[ONE_THREAD];
  Status *(*new_session)(void *, const char *, void *, void **) = api[NEW_SESSION];
  check(new_env(WARNINGS, "policy", &env));
  check(new_options(&options));
  check(set_threads(options, 1)); /* a small network is slower in several */
  check(new_session(env, model, options, &session));
  return session;
}

static size_t bytes_of(const char *name, int type) {
  switch (type) {
    case FLOAT32: case INT32: return 4;
    case UINT16: case INT16: return 2;
    case UINT8: case INT8: case BOOL: return 1;
  }
  fail(name, "has a type that this program does not know");
  return 0;
}

/* An input or output with memory that is ours: nothing is allocated from step to step. */
static Port port_of(void *session, size_t index, int name_of, int type_of) {
  Port port;
  void *allocator, *memory, *type;
  const void *shape;
  size_t dimensions;
  int64_t sizes[MOST_DIMENSIONS];
  Status *(*the_allocator)(void **) = api[ALLOCATOR];
  Status *(*get_name)(void *, size_t, void *, const char **) = api[name_of];
  Status *(*get_type)(void *, size_t, void **) = api[type_of];
  Status *(*tensor_of_type)(void *, const void **) = api[TENSOR_OF_TYPE];
  Status *(*element)(const void *, int *) = api[ELEMENT];
  Status *(*num_dimensions)(const void *, size_t *) = api[NUM_DIMENSIONS];
  Status *(*get_dimensions)(const void *, int64_t *, size_t) = api[DIMENSIONS];
  Status *(*new_memory)(int, int, void **) = api[NEW_MEMORY];
  Status *(*new_tensor)(void *, void *, size_t, const int64_t *, size_t, int, void **) =
      api[NEW_TENSOR];
  check(the_allocator(&allocator));
  check(get_name(session, index, allocator, &port.name));
  check(get_type(session, index, &type));
  check(tensor_of_type(type, &shape));
  check(element(shape, &port.type));
  check(num_dimensions(shape, &dimensions));
  if (dimensions > MOST_DIMENSIONS) fail(port.name, "has more dimensions than this program knows");
  check(get_dimensions(shape, sizes, dimensions));
  port.count = 1;
  for (size_t i = 0; i < dimensions; i++) {
    if (sizes[i] < 1) fail(port.name, "has no fixed size; export with --batch 1");
    port.count *= (size_t)sizes[i];
  }
  port.bytes = port.count * bytes_of(port.name, port.type);
  port.data = calloc(1, port.bytes);
  if (port.data == NULL) fail("memory", "there is not enough");
  check(new_memory(ARENA, DEFAULT_MEMORY, &memory));
  check(new_tensor(memory, port.data, port.bytes, sizes, dimensions, port.type, &port.tensor));
  return port;
}

static size_t ports_of(void *session, int num_ports, int name_of, int type_of, Port *ports) {
  size_t count;
  Status *(*get_count)(void *, size_t *) = api[num_ports];
  check(get_count(session, &count));
  if (count > MOST_PORTS) fail("the model", "has more inputs or outputs than this program knows");
  for (size_t i = 0; i < count; i++) ports[i] = port_of(session, i, name_of, type_of);
  return count;
}

static int is_read(const Port *port) {
  return strncmp(port->name, "obs", 3) == 0 || strcmp(port->name, "reward") == 0;
}

static double within(const Port *port, double value, double low, double high) {
  if (!(low <= value && value <= high)) fail(port->name, "has a number that its type does not hold");
  return value;
}

static void set(Port *port, size_t i, double value) {
  switch (port->type) {
    case FLOAT32: ((float *)port->data)[i] = (float)value; break;
    case INT32: ((int32_t *)port->data)[i] = (int32_t)within(port, value, INT32_MIN, INT32_MAX); break;
    case INT16: ((int16_t *)port->data)[i] = (int16_t)within(port, value, INT16_MIN, INT16_MAX); break;
    case UINT16: ((uint16_t *)port->data)[i] = (uint16_t)within(port, value, 0, UINT16_MAX); break;
    case INT8: ((int8_t *)port->data)[i] = (int8_t)within(port, value, INT8_MIN, INT8_MAX); break;
    default: ((uint8_t *)port->data)[i] = (uint8_t)within(port, value, 0, UINT8_MAX); break;
  }
}

/* The output that is this input in the next step; NULL if there is none. */
static const Port *carried(const Port *input, const Port *outputs, size_t count) {
  for (size_t i = 0; i < count; i++) {
    const char *name = outputs[i].name;
    int is_next = strncmp(name, "next_", 5) == 0 && strcmp(name + 5, input->name) == 0;
    if (is_next || (strcmp(name, "action") == 0 && strcmp(input->name, "prev_action") == 0))
      return outputs[i].bytes == input->bytes ? &outputs[i] : NULL;
  }
  return NULL;
}

static void begin_episode(Port *inputs, size_t count) {
  for (size_t i = 0; i < count; i++) {
    memset(inputs[i].data, 0, inputs[i].bytes);
    if (strcmp(inputs[i].name, "is_first") == 0) memset(inputs[i].data, 1, inputs[i].bytes);
  }
}

/* Reads an observation, after as many resets as there are; 0 where the text ends. */
static int read_observation(Port *inputs, size_t count) {
  char word[64];
  int has_begun = 0;
  for (size_t i = 0; i < count; i++) {
    if (!is_read(&inputs[i])) continue;
    for (size_t k = 0; k < inputs[i].count;) {
      if (scanf("%63s", word) != 1) {
        if (has_begun) fail("the last observation", "has too few numbers");
        return 0;
      }
      if (!has_begun && strcmp(word, "reset") == 0) {
        begin_episode(inputs, count);
        continue;
      }
      char *end;
      set(&inputs[i], k++, strtod(word, &end));
      if (*end != '\0') fail(word, "is neither a number nor, before an observation, reset");
      has_begun = 1;
    }
  }
  return has_begun;
}

static void print_action(const Port *action) {
  for (size_t i = 0; i < action->count; i++) {
    char end = i + 1 < action->count ? ' ' : '\n';
    if (action->type == INT32)
      printf("%d%c", ((int32_t *)action->data)[i], end);
    else
      printf("%.9g%c", ((float *)action->data)[i], end);
  }
}

int main(int argc, char **argv) {
  Port inputs[MOST_PORTS], outputs[MOST_PORTS];
  const char *input_names[MOST_PORTS], *output_names[MOST_PORTS];
  void *given[MOST_PORTS], *answers[MOST_PORTS];
  if (argc != 3) fail("usage", "run_policy LIBRARY MODEL < observations");
  load(argv[1]);
  void *session = session_of(argv[2]);
  size_t num_inputs = ports_of(session, NUM_INPUTS, INPUT_NAME, INPUT_TYPE, inputs);
  size_t num_outputs = ports_of(session, NUM_OUTPUTS, OUTPUT_NAME, OUTPUT_TYPE, outputs);
  const Port *next[MOST_PORTS], *action = NULL;
  for (size_t i = 0; i < num_inputs; i++) {
    input_names[i] = inputs[i].name;
    given[i] = inputs[i].tensor;
    next[i] = carried(&inputs[i], outputs, num_outputs);
  }
  for (size_t i = 0; i < num_outputs; i++) {
    output_names[i] = outputs[i].name;
    answers[i] = outputs[i].tensor;
    if (strcmp(outputs[i].name, "action") == 0) action = &outputs[i];
  }
  if (action == NULL) fail(argv[2], "has no output action; was it written by sebulba export?");

  Status *(*run)(void *, void *, const char **, void **, size_t, const char **, size_t, void **) =
      api[RUN];
  begin_episode(inputs, num_inputs);
  while (read_observation(inputs, num_inputs)) {
    check(run(session, NULL, input_names, given, num_inputs, output_names, num_outputs, answers));
    print_action(action);
    for (size_t i = 0; i < num_inputs; i++) {
      if (next[i] != NULL) memcpy(inputs[i].data, next[i]->data, inputs[i].bytes);
      if (strcmp(inputs[i].name, "is_first") == 0) memset(inputs[i].data, 0, inputs[i].bytes);
    }
  }
  return 0;
}
