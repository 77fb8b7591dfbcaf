{{- /* Parts of the admission policies. */ -}}

{{- /* Binding of a policy without parameters, called with its name: denies, in all namespaces. */ -}}
{{- define "tessera.binding" -}}
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata:
  name: {{ . }}
spec:
  policyName: {{ . }}
  validationActions: [Deny]
{{- end -}}

{{- /* Matches only requests of node plugins, not those of kubelets and administrators. */ -}}
{{- define "tessera.byANodePlugin" -}}
name: by-a-node-plugin
expression: request.userInfo.username == 'system:serviceaccount:{{ .Release.Namespace }}:tessera-node'
{{- end -}}

{{- /* The node to which the token is bound, or an empty string. */ -}}
{{- define "tessera.node" -}}
name: node
expression: "request.userInfo.extra[?'authentication.kubernetes.io/node-name'][0].orValue('')"
{{- end -}}

{{- /* Description of the token in messages. */ -}}
{{- define "tessera.thisToken" -}}
'this token is ' + (variables.node == '' ? 'bound to no node' : 'of node ' + variables.node)
{{- end -}}

{{- /*
True if an expression is the name of the node's pool, or of that of its monitor devices (driver/slices/slice_names.py). Names that are
too long end in a hash, which CEL cannot compute: only the part before it is compared.
*/ -}}
{{- define "tessera.isOwnPool" -}}
[variables.pool, variables.pool + '-monitor'].exists(own, {{ . }} == own || (own.size() > 253 && {{ . }}.size() > 200 && own.startsWith({{ . }}.substring(0, {{ . }}.size() - 11))))
{{- end -}}

{{- define "tessera.pool" -}}
name: pool
expression: variables.node + '-{{ .Values.driverName }}'
{{- end -}}

{{- /* A list, or an empty one if it is absent or null. */ -}}
{{- define "tessera.listOf" -}}
(has({{ . }}) && {{ . }} != null ? {{ . }} : [])
{{- end -}}
